//! Every file of CUDA kernels, for the offline check and its table of resources.

use crate::runtime::cuda::Source;

pub(crate) const ALL: &[&Source] = &[
    &crate::adamw::cuda::SOURCE,
    &crate::attention::cuda::GENERAL,
    &crate::attention::cuda::HOPPER,
    &crate::attention::cuda::MMA,
    &crate::embedding::cuda::SOURCE,
    &crate::encoder_attention::cuda::GENERAL,
    &crate::encoder_attention::cuda::HOPPER,
    &crate::encoder_attention::cuda::MMA,
    &crate::gather::cuda::SOURCE,
    &crate::gelu::cuda::SOURCE,
    &crate::global_norm::cuda::SOURCE,
    &crate::layernorm::cuda::SOURCE,
    &crate::layernorm::cuda::MIXED,
    &crate::linear::cuda::SOURCE,
    &crate::linear::cuda::few::SOURCE,
    &crate::linear::cuda::gated::SOURCE,
    &crate::linear_cross_entropy::cuda::HOPPER,
    &crate::linear_cross_entropy::cuda::SOURCE,
    &crate::matmul::cuda::HOPPER,
    &crate::matmul::cuda::SOURCE,
    &crate::option_features::cuda::SOURCE,
    &crate::rope::cuda::SOURCE,
];
