"""What is asked for with a function, without a run: verify exactness, predict a peak, plan training."""

from lightning_memsave.api.plan_training_run import plan_training
from lightning_memsave.api.predict_peak import predict
from lightning_memsave.api.verify_exactness import verify

__all__ = ["plan_training", "predict", "verify"]
