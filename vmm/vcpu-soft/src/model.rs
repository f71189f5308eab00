//! What a CPU model means to the decoder.

use iced_x86::{CpuidFeature, DecoderOptions, Instruction};
use weft_vcpu::CpuModel;

/// Whether the guest's CPU has an instruction; of those that every model has, or
/// none, it says yes.
pub fn offers(model: CpuModel, instruction: &Instruction) -> bool {
    let features = instruction.cpuid_features();
    features.iter().all(|feature| model >= first_with(*feature))
}

/// How a CPU of this model decodes: what it does not have of TZCNT, LZCNT and WBNOINVD are
/// the instructions that they extend.
pub const fn decoder_options(model: CpuModel) -> u32 {
    const COUNTS: u32 = DecoderOptions::NO_MPFX_0FBC | DecoderOptions::NO_MPFX_0FBD;
    match model {
        CpuModel::V1 | CpuModel::V2 => COUNTS | DecoderOptions::NO_WBNOINVD,
        CpuModel::V3 => DecoderOptions::NO_WBNOINVD,
    }
}

fn first_with(feature: CpuidFeature) -> CpuModel {
    use CpuidFeature::*;
    match feature {
        SSE3 | SSSE3 | SSE4_1 | SSE4_2 | POPCNT | AES | PCLMULQDQ => CpuModel::V2,
        AVX | AVX2 | FMA | F16C | BMI1 | BMI2 | LZCNT | MOVBE | XSAVE | XSAVEOPT => CpuModel::V3,
        _ => CpuModel::V1,
    }
}
