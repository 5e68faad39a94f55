"""Every differentiable operation of torch's own database inside a store; the lists below are reviewed by eye.

A change of torch or of the policy shows as an operation that moves from one list to another.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from lightning_memsave.saved_tensors.policy import LOSSY as POLICY_LOSSY

pytest.importorskip("expecttest", reason="torch's database of operations imports it")

ROOT = Path(__file__).parents[2]
IS_LISTED = TorchVersion("2.13") <= torch.__version__ < TorchVersion("2.14")
"""Whether this is the version whose database the lists are of; others have some operations more, and some less."""
BOUND = 0.05
"""On the relative error of a gradient from 8-bit codes: a code is off by 1/255 of its block's range at most, a short
block's range is some standard deviations, and the products of a sample add a few such errors."""

LOOSE = {
    # Its derivative jumps by 0.5 at -3 and 3: a value within the noise of these may land on the other side.
    "nn.functional.hardswish": 0.1,
    # The samples have logits of a hundred. The fused kernel, from torch 2.14 on for inputs of three dimensions as well,
    # computes the softmax again from codes: e to the power of their noise.
    "nn.functional.scaled_dot_product_attention": 0.5 if torch.__version__ >= TorchVersion("2.14") else BOUND,
}

# fmt: off
LOSSY = """
__rmatmul__ __rmul__ addbmm addcmul addmm baddbmm bmm einsum inner linalg.pinv masked.std masked.var matmul mm mul
mv nn.functional.batch_norm nn.functional.bilinear nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d
nn.functional.conv_transpose1d nn.functional.conv_transpose2d nn.functional.conv_transpose3d nn.functional.elu
nn.functional.gelu nn.functional.glu nn.functional.group_norm nn.functional.hardswish nn.functional.instance_norm
nn.functional.layer_norm nn.functional.linear nn.functional.mish nn.functional.multi_head_attention_forward
nn.functional.prelu nn.functional.rms_norm nn.functional.scaled_dot_product_attention nn.functional.silu
nn.functional.softplus outer pca_lowrank square svd_lowrank tensordot
"""
RECOMPUTED = """
__rdiv__ __rmul__ einsum inner kron mul native_batch_norm native_group_norm nn.functional.batch_norm
nn.functional.elu nn.functional.gelu nn.functional.group_norm nn.functional.hardsigmoid nn.functional.selu
nn.functional.hardswish nn.functional.kl_div nn.functional.layer_norm nn.functional.mish
nn.functional.multi_head_attention_forward nn.functional.multilabel_soft_margin_loss nn.functional.poisson_nll_loss
nn.functional.rms_norm nn.functional.scaled_dot_product_attention nn.functional.silu nn.functional.softplus outer
"""
EXACT = """
__getitem__ __rdiv__ __rmod__ __rpow__ _batch_norm_with_update _native_batch_norm_legit _segment_reduce
_softmax_backward_data _unsafe_masked_index _unsafe_masked_index_put_accumulate abs acos acosh addcdiv addmv addr amax
amin aminmax angle asin asinh atan atan2 atanh cdist cholesky clamp clamp_max clamp_min combinations complex copysign
corrcoef cos cosh cov cross cummax cummin cumprod cumulative_trapezoid digamma dist div dot erf erfc erfinv exp exp2
expm1 fft.fft fft.ifft fft.ihfft fft.ihfft2 fft.ihfftn fft.rfft fft.rfft2 fft.rfftn float_power fmax fmin fmod frexp
gather grid_sampler_2d grid_sampler_3d hypot i0 index_add index_copy index_fill index_put index_reduce index_select
kron kthvalue ldexp lgamma linalg.cholesky linalg.cholesky_ex linalg.cond linalg.cross linalg.det linalg.eig
linalg.eigh linalg.eigvals linalg.eigvalsh linalg.householder_product linalg.inv linalg.inv_ex linalg.lstsq linalg.lu
linalg.lu_factor linalg.lu_factor_ex linalg.lu_solve linalg.matrix_norm linalg.matrix_power linalg.multi_dot
linalg.norm linalg.qr linalg.slogdet linalg.solve linalg.solve_ex linalg.solve_triangular linalg.svdvals
linalg.tensorinv linalg.tensorsolve linalg.vander linalg.vecdot linalg.vector_norm log log10 log1p log2 log_softmax
logaddexp logaddexp2 logcumsumexp logdet logit logsumexp lu lu_solve masked.amax masked.amin masked.cumprod
masked.cumsum masked.log_softmax masked.logaddexp masked.logsumexp masked.mean masked.median masked.norm
masked.normalize masked.prod masked.softmax masked.softmin masked.sum masked_fill masked_scatter masked_select
matrix_exp max max_pool2d_with_indices_backward maximum median min minimum mode msort mvlgamma nan_to_num nanmean
nanmedian nanquantile nansum native_batch_norm native_dropout_backward native_group_norm native_layer_norm nextafter
nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool2d nn.functional.adaptive_avg_pool3d
nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d nn.functional.adaptive_max_pool3d
nn.functional.alpha_dropout nn.functional.avg_pool1d nn.functional.avg_pool2d nn.functional.avg_pool3d
nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits nn.functional.celu
nn.functional.cosine_embedding_loss nn.functional.cosine_similarity nn.functional.cross_entropy nn.functional.ctc_loss
nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.embedding
nn.functional.embedding_bag nn.functional.feature_alpha_dropout nn.functional.fractional_max_pool2d
nn.functional.fractional_max_pool3d nn.functional.gaussian_nll_loss nn.functional.grid_sample nn.functional.hardshrink
nn.functional.hardsigmoid nn.functional.hardtanh nn.functional.hinge_embedding_loss nn.functional.huber_loss
nn.functional.interpolate nn.functional.kl_div nn.functional.l1_loss nn.functional.leaky_relu
nn.functional.linear_cross_entropy nn.functional.local_response_norm nn.functional.logsigmoid
nn.functional.margin_ranking_loss nn.functional.max_pool1d nn.functional.max_pool2d nn.functional.max_pool3d
nn.functional.max_unpool1d nn.functional.max_unpool2d nn.functional.max_unpool3d nn.functional.mse_loss
nn.functional.multi_margin_loss nn.functional.multilabel_margin_loss nn.functional.multilabel_soft_margin_loss
nn.functional.nll_loss nn.functional.normalize nn.functional.pad nn.functional.pairwise_distance nn.functional.pdist
nn.functional.poisson_nll_loss nn.functional.relu nn.functional.relu6 nn.functional.rrelu nn.functional.selu
nn.functional.smooth_l1_loss nn.functional.soft_margin_loss nn.functional.softmin nn.functional.softshrink
nn.functional.softsign nn.functional.tanhshrink nn.functional.threshold nn.functional.triplet_margin_loss
nn.functional.triplet_margin_with_distance_loss norm ormqr pinverse polar polygamma pow prod put qr quantile
reciprocal remainder renorm rsqrt scatter scatter_add scatter_reduce sgn sigmoid sin sinc sinh softmax sort sparse.mm
special.entr special.erfcx special.i0e special.i1 special.i1e special.log_ndtr special.ndtr special.ndtri
special.polygamma special.xlog1py sqrt std std_mean stft take take_along_dim tan tanh topk
torch.ops.aten._safe_softmax.default trapezoid trapz triangular_solve true_divide var var_mean vdot where xlogy
"""
NOT_SAVING = """
H T __radd__ __rsub__ _upsample_bilinear2d_aa add alias_copy as_strided as_strided_copy as_strided_scatter atleast_1d
atleast_2d atleast_3d bernoulli bfloat16 block_diag broadcast_tensors broadcast_to cartesian_prod cat cdouble ceil
cfloat chalf cholesky_inverse cholesky_solve chunk clone column_stack conj conj_physical constant_pad_nd contiguous
cumsum deg2rad diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff double dsplit dstack expand
expand_as expand_copy fft.fft2 fft.fftn fft.fftshift fft.hfft fft.hfft2 fft.hfftn fft.ifft2 fft.ifftn fft.ifftshift
fft.irfft fft.irfft2 fft.irfftn fill flatten flip fliplr flipud float floor frac gradient half hsplit hstack lerp
linalg.diagonal linalg.svd lu_unpack mH mT mean meshgrid movedim narrow narrow_copy neg nn.functional.channel_shuffle
nn.functional.pixel_shuffle nn.functional.pixel_unshuffle nn.functional.unfold nn.functional.upsample_bilinear
nn.functional.upsample_nearest normal permute permute_copy positive rad2deg ravel real repeat repeat_interleave
reshape reshape_as resolve_conj resolve_neg roll rot90 round rsub select select_scatter sign slice slice_scatter
sparse.sampled_addmm split split_with_sizes split_with_sizes_copy squeeze squeeze_copy stack sub sum sum_to_size svd t
t_copy tensor_split tile to to_sparse trace transpose transpose_copy tril triu trunc unbind unbind_copy unflatten
unfold unfold_copy unsafe_chunk unsafe_split unsqueeze unsqueeze_copy view view_as view_as_complex view_copy vsplit
vstack zero_
"""
# fmt: on

ABSENT = "__imul__ __matmul__ __mul__ mul_ multiply relu_ leaky_relu_"
"""Functions of the policy that the database calls by another name, or not at all."""
SIGNS = "nn.functional.prelu"
"""Lossy codes that keep signs, which is all that the gradient of an input reads."""
SIGN_ALONE = "relu leaky_relu"
"""Of the policy's lossy functions, those of which a sign was enough."""


def run(dtype):
    done = subprocess.run(
        [sys.executable, "-m", "tests.saved_tensors.op_db_program", dtype],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def reports():
    return run("float64")


def too_large(reports):
    return {name: report["error"] for name, report in reports.items() if report["error"] > LOOSE.get(name, BOUND)}


def kinds(reports, store):
    return sum((Counter(report["kinds"][store]) for report in reports.values()), Counter())


def test_gradients_are_those_of_plain_autograd(reports):
    """Equal to the bit without codes, and where a code was allowed and not used; within the bound where it was."""
    assert {name: report["wrong"] for name, report in reports.items() if report["wrong"]} == {}
    assert too_large(reports) == {}
    assert len(reports) > 470
    assert sum(report["num_samples"] for report in reports.values()) > 1400
    assert [name for name, report in reports.items() if not report["num_samples"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_plain_autograd_in_other_types(dtype):
    reports = run(dtype)
    assert {name: report["wrong"] for name, report in reports.items() if report["wrong"]} == {}
    assert too_large(reports) == {}
    assert len(reports) > 390


def test_which_operations_are_lossy_exact_or_keep_nothing(reports):
    found = {"LOSSY": set(), "EXACT": set(), "NOT_SAVING": set()}
    for name, report in reports.items():
        kept = report["kinds"]["lossy"]
        found["LOSSY" if {"int8", "int8 derivative"} & kept.keys() else "EXACT" if kept else "NOT_SAVING"].add(name)
    listed = {"LOSSY": LOSSY, "EXACT": EXACT, "NOT_SAVING": NOT_SAVING}
    all_listed = {name for text in listed.values() for name in text.split()}
    for category, text in listed.items():
        assert sorted(found[category] & all_listed) == sorted(set(text.split()) & reports.keys()), category
    if IS_LISTED:
        assert reports.keys() == all_listed


def test_every_lossy_function_of_the_policy_was_met():
    met = {name.split(".")[-1] for name in LOSSY.split()}
    assert sorted(POLICY_LOSSY - met) == sorted([*ABSENT.split(), *SIGN_ALONE.split()])


def test_errors_are_real_where_codes_are(reports):
    """Codes that never show in a gradient were never read: the comparison would be empty."""
    silent = [name for name in LOSSY.split() if reports[name]["error"] == 0]
    assert set(silent) <= set(SIGNS.split())


def test_which_results_can_be_computed_again(reports):
    found = [name for name, report in reports.items() if report["kinds"]["consumed"].get("recomputed")]
    expected = set(RECOMPUTED.split()) & reports.keys()
    if torch.__version__ >= TorchVersion("2.14"):
        expected.remove("native_group_norm")  # whose node keeps no epsilon, and which is no function of torch.nn's
    assert sorted(found) == sorted(expected)


def test_every_form_was_exercised(reports):
    lossy, exact = kinds(reports, "lossy"), kinds(reports, "exact") + kinds(reports, "consumed")
    assert set(lossy) == {
        "raw",
        "1-bit mask",
        "narrowed integers",
        "int8",
        "int8 derivative",
        "shape only",
        "pool index",
    }
    assert set(exact) == {"raw", "1-bit mask", "narrowed integers", "recomputed", "shape only", "pool index"}
    assert lossy["int8"] > 200
