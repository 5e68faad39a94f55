"""The mixin of every strategy with memory saving: the registered ones, and whichever strategy the user chose.

It derives from Lightning's `Strategy`, because Python only lets an object change its class between classes of the same
layout.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_memsave.core.compatibility import check_compatibility
from lightning_memsave.lightning_compat import (
    bucket_bytes_of,
    callbacks_of,
    counterpart,
    ddp_options_of,
    is_overridden,
    namespace_of,
    reaches_grad,
    says_grad,
)
from lightning_memsave.loops.evaluation import evaluate
from lightning_memsave.loops.microbatch_loop import MicrobatchLoop
from lightning_memsave.loops.optimizer_changes import ClippingRelease, change_optimizers, readable
from lightning_memsave.loops.session import Session, naming_the_setting
from lightning_memsave.loops.trainer_features import ways_of_training
from lightning_memsave.planner.recipes import RECIPES, Recipe
from lightning_memsave.strategies.apply_recipe import (
    apply_to_evaluation,
    apply_to_model,
    apply_to_steps,
    check_made_optimizers,
    leave_layers_dense,
)
from lightning_memsave.techniques.microbatching import Microbatching, active_microbatching
from lightning_memsave.techniques.optimizer_state import GradientExchange, OptimizerState, pages_kept, send_from_first
from lightning_memsave.torch_internals.held_optimizers import with_held
from lightning_memsave.torch_internals.optimizer_class import name_of

_SHARDS = "model parallel (FSDP2)"


class MemSaveMixin(Strategy):
    """Adds a session to a strategy of Lightning's: what it sets up, runs and checkpoints is as the recipe says."""

    callback_class: type[L.Callback] | None = None
    """The callback of a run that names one of our strategies and has no `MemSave`: it measures, logs and sums up."""
    _memsave: Session | None = None
    _memsave_before: Session | None = None
    _has_fitted = False
    _is_down = False
    _exchanges = False
    """Whether gradients are averaged in backward, without DDP around the model."""

    @property
    def memsave(self) -> Session:
        """The recipe and what came of it; the lossless recipe unless the callback says otherwise."""
        if self._memsave is None:
            self._memsave = Session(RECIPES["lossless"])
        return self._memsave

    @property
    def _running_trainer(self) -> Any:
        module: Any = self.lightning_module
        return module.trainer

    def connect(self, model: L.LightningModule) -> None:
        """Take the model, and see to it that a fit has a `MemSave` among its callbacks."""
        super().connect(model)
        trainer, kind = getattr(model, "_trainer", None), self.callback_class
        if trainer is None or kind is None or trainer.state.fn != "fit" or trainer.barebones:
            return
        if not any(isinstance(callback, kind) for callback in callbacks_of(trainer)):
            callbacks_of(trainer).insert(0, kind())

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Run `configure_model` inside, where FSDP2 shards the model: settings are chosen before."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        if trainer is not None and trainer.state.fn == "fit" and _SHARDS in ways_of_training(trainer):
            self.memsave.decide(trainer)
        with super().tensor_init_context(empty_init):
            yield

    def setup(self, trainer: L.Trainer) -> None:
        """Set up model and optimizers with what the recipe says."""
        fitting = self._has_fitted = trainer.state.fn == "fit"
        self._is_down = self._exchanges = False
        ways = ways_of_training(trainer)
        if not fitting and (_SHARDS in ways or not self.memsave.recipe.stepping_aside(ways)[0].get(Microbatching)):
            self.memsave.evaluation = None
        if not fitting:
            apply_to_evaluation(self.memsave, trainer)
        if fitting:
            self._begin(trainer)
            _install_loop(trainer, self.memsave)
            apply_to_model(self.memsave, trainer)
        with pages_kept(with_held(self.optimizers) if fitting else ()):
            super().setup(trainer)
        if fitting:
            if self.memsave.zero_grad_first and (optimizer := _zeroing_itself(self.optimizers)):
                self.memsave.zero_grad_first = False
                rank_zero_info(f"memsave: gradients are freed by {optimizer}.zero_grad, after the forward pass.")
            apply_to_steps(self.memsave, trainer)
            if _SHARDS in ways:
                self.memsave.recover_jointly(trainer.lightning_module)

    def _begin(self, trainer: L.Trainer) -> None:
        """Take up the recipe, as far as this way of training allows; a second fit starts with a clean record."""
        ways = ways_of_training(trainer)
        decided = self.memsave.decide(trainer)
        recipe, reasons = decided.stepping_aside(ways)
        check_compatibility([*recipe.rows(), *ways])
        for reason in reasons:
            rank_zero_info(f"memsave: {reason}")
        if self.memsave.started:
            self._memsave = Session(decided, self.memsave.source).after(self.memsave)
        self.memsave.begin(recipe)

    def configure_ddp(self) -> None:
        """Wrap the model in DDP; where gradients end in backward, they are exchanged there instead."""
        config = self.memsave.recipe.get(OptimizerState)
        if config is None or config.gradients == "keep":
            self._wrap_in_ddp()
            return
        self._exchanges = True
        model: Any = self.model
        send_from_first([t for _, t in self._averaged(model)], ddp_options_of(self).get("process_group"))

    @staticmethod
    def _averaged(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what DDP holds alike in all processes, by name."""
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        named = (*model.named_parameters(), *model.named_buffers())
        yield from ((name, tensor) for name, tensor in named if name not in ignored)

    def _send_buffers(self) -> None:
        """Give every process the buffers of the first, as DDP's forward does."""
        if self._exchanges and ddp_options_of(self).get("broadcast_buffers", True):
            buffers = [t for _, t in self._averaged(self.lightning_module) if not isinstance(t, nn.Parameter)]
            send_from_first(buffers, ddp_options_of(self).get("process_group"))

    def _wrap_in_ddp(self) -> None:
        super().configure_ddp()  # type: ignore[misc]  # called by DDP's strategies only
        self._exchanges = False

    def _new_exchange(self) -> GradientExchange | None:
        if not self._exchanges:
            return None
        options = ddp_options_of(self)
        stepped = {p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        return GradientExchange(
            [p for _, p in self._averaged(self.lightning_module) if p.requires_grad and p in stepped],
            finds_unused=options.get("find_unused_parameters", False) or options.get("static_graph", False),
            broadcast=self.broadcast,
            group=options.get("process_group"),
            bucket_bytes=bucket_bytes_of(self),
        )

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Make the optimizers, and change those that the recipe is about."""
        session = self.memsave
        try:
            super().setup_optimizers(trainer)
            if session.compact_training is not None:
                session.compact_training.begin(self.optimizers)
        except Exception as error:  # of user code as well, which may look for matrices
            if self.model is not self.lightning_module or not leave_layers_dense(session, trainer, error):
                raise
            super().setup_optimizers(trainer)
        if session.weights is not None:
            session.weights.materialized()
        check_made_optimizers(session, trainer, is_wrapped=self.model is not self.lightning_module)
        done, session.release = change_optimizers(trainer, session.recipe, session.weights, self._new_exchange())
        session.changes.extend(done)
        if session.release is not None:
            session.release.wait_for_own_backward()
        if self._exchanges and session.release is None:  # the default that ends gradients in backward was left out
            self._wrap_in_ddp()
        if session.compact_training is not None:
            session.compact_training.follow(trainer, self.optimizers)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step, and move patterns of sparse layers that are due."""
        if self.memsave.release is not None:
            self.memsave.release.check_is_known(optimizer)
        output = super().optimizer_step(optimizer, *args, **kwargs)
        if self.memsave.compact_training is not None:
            self.memsave.compact_training.stepped(self._running_trainer, optimizer)
        return output

    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward; an error about dtypes names the setting that may be its cause."""
        with naming_the_setting(self.memsave.weights), self.memsave.own_backward():
            return super().backward(*args, **kwargs)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Exchange the gradients of this backward that other processes still wait for."""
        super().post_backward(closure_loss)
        if self.memsave.release is not None:
            self.memsave.release.finish_backward()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step in the scopes of the session."""
        module: Any = self.lightning_module
        self.memsave.begin_step()
        self._send_buffers()
        on_use = functools.partial(self.memsave.cutter.used_by_hand, module)
        step = functools.partial(super().training_step, *args, **kwargs)
        run = functools.partial(self.memsave.run, self._running_trainer, step, args)
        with active_microbatching(self.memsave.recipe.get(Microbatching), on_use):
            if isinstance(release := self.memsave.release, ClippingRelease) and not self.memsave.scopes.is_rehearsing:
                self.memsave.scopes.plan(self._running_trainer, args)
                release.before_batch(run, args)
            return run()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the batch, in parts where it has to be cut."""
        self._send_buffers()
        return self._evaluate(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the batch, in parts where it has to be cut."""
        return self._evaluate(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the batch, in parts where it has to be cut."""
        return self._evaluate(super().predict_step, args, kwargs)

    def _evaluate(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trainer, session = self._running_trainer, self.memsave
        scoped = functools.partial(session.scopes.evaluate, trainer, functools.partial(step, **kwargs))
        return evaluate(trainer, session, scoped, args)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state for a checkpoint, in the layout of the dense model."""
        compact = self.memsave.compact_training
        if compact is None:
            return super().optimizer_state(optimizer)
        plain = getattr(optimizer, "_optimizer", optimizer)  # LightningOptimizer wraps
        with compact.as_in_the_run(plain):
            return compact.to_disk(plain, super().optimizer_state(optimizer))

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint; Lightning reads shards in the dtype of the parameters, which are float32 meanwhile."""
        weights = self.memsave.weights
        with weights.in_float32() if weights is not None and weights.are_sharded else contextlib.nullcontext():
            return super().load_checkpoint(*args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load states that plain Lightning or another format has written."""
        checkpoint = readable(self.optimizers, checkpoint)
        if self.memsave.compact_training is not None:
            checkpoint = self.memsave.compact_training.from_disk(self.optimizers, checkpoint)
        with pages_kept(with_held(self.optimizers)):
            super().load_optimizer_state_dict(checkpoint)

    def teardown(self) -> None:
        """Give back what was changed, and tear down."""
        module: Any = self.lightning_module
        try:  # first: what gives the model back takes memory, and the device may be full
            with pages_kept(with_held(self.optimizers)):
                super().teardown()
        finally:
            trainer = getattr(module, "_trainer", None)  # none yet where the fit was refused before it began
            self.memsave.finish(is_refused=trainer is not None and trainer.interrupted)
            _remove_loop(module)
            self._is_down = True
        if trainer is None or trainer.interrupted:
            release(self)  # callbacks are not torn down then
            return
        if self._has_fitted:
            self.memsave.cutter.tell_cost()
            self.memsave.cutter.warn_if_unused(module)
        _give_class_back(self)


def _install_loop(trainer: L.Trainer, session: Session) -> None:
    if not trainer.lightning_module.automatic_optimization:
        session.zero_grad_first = False  # Lightning bypasses the loop, and the user zeroes gradients
    if session.cutter.config is None and not session.zero_grad_first:
        return
    if reaches_grad(trainer.lightning_module, "training_step"):
        session.reads_gradients = f"{type(trainer.lightning_module).__name__}.training_step"
    if session.zero_grad_first and (hook := _reader_of_gradients(trainer)):
        session.zero_grad_first = False
        rank_zero_info(f"memsave: gradients are freed after the forward pass, as {hook} may read them.")
    epoch_loop = trainer.fit_loop.epoch_loop
    loop = counterpart(MicrobatchLoop, namespace_of(trainer))
    epoch_loop.automatic_optimization = loop(epoch_loop.automatic_optimization, session)


def _reader_of_gradients(trainer: L.Trainer) -> str | None:
    """Return a method of the user's that may read the last step's gradients before they are zeroed, or `None`."""
    hooks = [(owner, "on_before_zero_grad") for owner in (trainer.lightning_module, *callbacks_of(trainer))]
    for owner, hook in (*hooks, (trainer.lightning_module, "optimizer_zero_grad")):
        if is_overridden(owner, hook):
            return f"{type(owner).__name__}.{hook}"
    return _reader_in_forward(trainer.lightning_module)


def _zeroing_itself(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Return the name of an optimizer that does something of its own to zero gradients, such as keeping zeros."""
    plain = torch.optim.Optimizer.zero_grad
    for optimizer in with_held(optimizers):
        if "zero_grad" in vars(optimizer) or type(optimizer).zero_grad is not plain:
            return name_of(type(optimizer))
    return None


_AFTER_BACKWARD = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "on_train_batch_end",
)


def _reader_in_forward(module: L.LightningModule) -> str | None:
    """Return a method of the module's own that says `.grad`, before backward as far as its name tells."""
    for cls in type(module).__mro__:
        if cls.__module__.startswith(("lightning.", "pytorch_lightning.", "torch.", "builtins")):
            continue
        for name, method in vars(cls).items():
            if name not in _AFTER_BACKWARD and says_grad(method):
                return f"{cls.__name__}.{name}"
    return f"{type(module).__name__}.training_step" if reaches_grad(module, "training_step") else None


def _remove_loop(module: L.LightningModule | None) -> None:
    trainer = getattr(module, "_trainer", None)
    epoch_loop = trainer.fit_loop.epoch_loop if trainer is not None else None
    if epoch_loop is not None and hasattr(epoch_loop.automatic_optimization, "parent"):
        epoch_loop.automatic_optimization = epoch_loop.automatic_optimization.parent


_ADOPTED: dict[type, Any] = {}


def _adopted_class(cls: type, namespace: str) -> Any:
    if cls not in _ADOPTED:
        own = {
            "__module__": __name__,
            "adopted_from": cls,
            "__reduce_ex__": lambda self, _: (_unpickled, (cls, namespace), self.__getstate__()),
        }
        _ADOPTED[cls] = type(f"MemSave{cls.__name__}", (counterpart(MemSaveMixin, namespace), cls), own)
    return _ADOPTED[cls]


def _unpickled(cls: type, namespace: str) -> Any:
    """Return an adopted strategy, as yet without attributes."""
    adopted = _adopted_class(cls, namespace)
    return adopted.__new__(adopted)


def adopt(strategy: Any, session: Session) -> None:
    """Give a live strategy the mixin, as Lightning does with optimizers.

    Args:
        strategy: the trainer's.
        session: has the recipe, and is where the strategy will record what it did. It holds neither model nor trainer
            once the run is over.

    Raises:
        TypeError: `strategy` is not a Lightning strategy.
    """
    namespace = namespace_of(strategy)
    if not isinstance(strategy, counterpart(MemSaveMixin, namespace)):
        strategy.__class__ = _adopted_class(type(strategy), namespace)
    elif strategy._memsave is None:
        strategy._memsave = strategy.memsave  # one of ours by name: lossless
    if strategy._memsave_before is None:
        strategy._memsave_before = strategy._memsave or Session(Recipe("adopted"))
    strategy._memsave = session


def release(strategy: Any) -> None:
    """Undo `adopt`: give the strategy its recipe back and, once it is torn down, its own class.

    A strategy that has trained compact layers (sparse ones, for example) keeps ours, which writes and reads their
    checkpoints.
    """
    if getattr(strategy, "_memsave_before", None) is not None:
        strategy._memsave_before.compact_training = strategy._memsave.compact_training
        strategy._memsave, strategy._memsave_before = strategy._memsave_before, None
        _give_class_back(strategy)


_OWN = {"_memsave", "_memsave_before", "_has_fitted", "_is_down", "_exchanges"}


def _give_class_back(strategy: Any) -> None:
    """Give the class back once callback and strategy are both torn down, which may be in either order."""
    is_over = strategy._is_down and strategy._memsave_before is None
    if (
        is_over
        and strategy.memsave.compact_training is None
        and (plain := getattr(type(strategy), "adopted_from", None)) is not None
    ):
        for name in _OWN & vars(strategy).keys():
            delattr(strategy, name)
        strategy.__class__ = plain
