"""List the aten ops that need no formula for their FLOPs, because memory decides how long they take.

Element-wise ops and reductions carry a tag of torch's. This file lists the others that do a few FLOPs per element:
softmax, norms, sums, pooling, losses, sorting, random numbers. One FLOP per element of their largest operand is counted
for all of them.
"""

from __future__ import annotations

from functools import cache

import torch

_NAMES = """
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax _masked_softmax
    _masked_softmax_backward native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    native_batch_norm native_batch_norm_backward batch_norm_backward _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_with_update
    _batch_norm_with_update_functional _batch_norm_no_update _fused_rms_norm _fused_rms_norm_backward
    _weight_norm_interface _weight_norm_interface_backward renorm native_norm

    cumsum cumprod cummax cummin _cummax_helper _cummin_helper logcumsumexp _logcumsumexp trace _aminmax median
    nanmedian mode kthvalue sort topk searchsorted bucketize isin histc histogram bincount unique_dim
    unique_consecutive _unique2 _unique nonzero nonzero_static segment_reduce _segment_reduce_backward

    index_add index_copy index_fill index_reduce index_put _index_put_impl _unsafe_index_put _unsafe_index
    _unsafe_masked_index _unsafe_masked_index_put_accumulate scatter_add scatter_reduce masked_scatter
    masked_scatter_backward masked_select take put repeat_interleave unfold_backward im2col col2im channel_shuffle
    pixel_shuffle pixel_unshuffle rot90 diag_embed diagonal_backward tril_indices triu_indices linspace logspace
    new_empty_strided empty_strided copy_ zero zero_ fill_ _reshape_copy unsafe_split unsafe_split_with_sizes
    split_with_sizes_copy _chunk_cat _pin_memory resize set_ lift reflection_pad1d reflection_pad2d reflection_pad3d
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d replication_pad2d
    replication_pad3d replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward

    embedding_renorm _embedding_bag _embedding_bag_forward_only _embedding_bag_backward _embedding_bag_dense_backward
    _embedding_bag_per_sample_weights_backward

    avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward max_pool2d_with_indices
    max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward adaptive_max_pool2d
    adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward fractional_max_pool2d
    fractional_max_pool2d_backward max_unpool2d max_unpool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_nearest_exact1d_backward
    _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward upsample_linear1d upsample_linear1d_backward
    upsample_bilinear2d upsample_bilinear2d_backward upsample_trilinear3d upsample_trilinear3d_backward
    upsample_bicubic2d upsample_bicubic2d_backward affine_grid_generator grid_sampler_2d grid_sampler_2d_backward
    grid_sampler_3d grid_sampler_3d_backward

    glu glu_backward elu_backward hardshrink_backward hardsigmoid_backward hardswish hardswish_backward
    hardtanh_backward leaky_relu_backward log_sigmoid_forward log_sigmoid_backward softplus_backward
    softshrink_backward _prelu_kernel _prelu_kernel_backward rrelu_with_noise rrelu_with_noise_functional
    rrelu_with_noise_backward _add_relu complex polar floor_divide addr outer ger _thnn_fused_lstm_cell
    _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell _thnn_fused_gru_cell_backward

    nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward
    smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy
    binary_cross_entropy_backward binary_cross_entropy_with_logits soft_margin_loss soft_margin_loss_backward
    multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward multilabel_margin_loss_backward

    native_dropout native_dropout_backward _masked_scale bernoulli bernoulli_ normal normal_ normal_functional uniform
    uniform_ exponential exponential_ random random_ rand rand_like randn randn_like randint randint_like randperm
    multinomial poisson
"""

NAMES = frozenset(_NAMES.split())


_TAGS = (torch.Tag.pointwise, torch.Tag.reduction, torch.Tag.view_copy)


@cache
def needs_no_formula(op: torch._ops.OpOverload) -> bool:
    """Return whether this op of aten is known to do a few FLOPs per element."""
    namespace, _, name = op._schema.name.partition("::")
    if namespace != "aten":
        return False
    packet = (
        op.overloadpacket
    )  # overloads that write into a given tensor may lack the tags of the others
    tagged = any(
        tag in getattr(packet, overload).tags for overload in packet.overloads() for tag in _TAGS
    )
    return tagged or name in NAMES or name.removesuffix("_") in NAMES
