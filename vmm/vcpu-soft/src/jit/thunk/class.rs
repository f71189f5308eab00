//! Which unit runs an instruction, and what the manual says of it.

use iced_x86::{Code, CpuidFeature, EncodingKind, Instruction, Mnemonic, OpKind};
use weft_vcpu::CpuModel;

use crate::model::offers;

/// Which state an instruction works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// XMM registers.
    Sse,
    /// XMM and YMM registers, by VEX encodings.
    Avx,
    /// General registers, more than one.
    General,
    /// The x87 or MMX registers, perhaps XMM as well (MOVQ2DQ).
    X87,
    /// The x87 control and status words themselves: they are as the guest has
    /// them, and no exception can arise.
    X87Control,
}

/// Whether a 16-byte operand at an address that is no multiple of 16 faults
/// (Intel SDM volume 1, 10.4.1.1).
pub fn needs_alignment(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    !matches!(
        mnemonic,
        Movups
            | Movupd
            | Movdqu
            | Lddqu
            | Maskmovdqu
            | Maskmovq
            | Pcmpestri
            | Pcmpestri64
            | Pcmpestrm
            | Pcmpestrm64
            | Pcmpistri
            | Pcmpistrm
    )
}

/// Whether a VEX-encoded instruction's operand must be at a multiple of its size
/// (Intel SDM volume 1, 14.9): all others may be anywhere.
pub(super) fn is_aligned_move(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Vmovaps | Vmovapd | Vmovdqa | Vmovntps | Vmovntpd | Vmovntdq | Vmovntdqa
    )
}

/// The comparisons of strings, of which some give a general register.
pub(super) fn is_string(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Vpcmpestri | Vpcmpestri64 | Vpcmpestrm | Vpcmpestrm64 | Vpcmpistri | Vpcmpistrm
    )
}

/// The unit that runs a VEX-encoded instruction, or one on general registers that
/// came with them.
pub(super) fn later_unit(instruction: &Instruction) -> Option<Unit> {
    use CpuidFeature::{AES, AVX, AVX2, BMI1, BMI2, F16C, FMA, LZCNT, MOVBE, PCLMULQDQ};
    let features = instruction.cpuid_features();
    let all = |known: &[CpuidFeature]| features.iter().all(|feature| known.contains(feature));
    if all(&[BMI1, BMI2, LZCNT, MOVBE]) {
        Some(Unit::General)
    } else if all(&[AVX, AVX2, F16C, FMA, AES, PCLMULQDQ]) {
        Some(Unit::Avx)
    } else {
        None
    }
}

/// The unit that runs an instruction; `None` when no thunk can.
pub(super) fn unit_of(instruction: &Instruction, model: CpuModel) -> Option<Unit> {
    use CpuidFeature::{
        AES, FPU, FPU287, FPU387, MMX, PCLMULQDQ, SSE, SSE2, SSE3, SSE4_1, SSE4_2, SSSE3,
    };
    use Mnemonic::*;
    let features = instruction.cpuid_features();
    let vex = instruction.encoding() == EncodingKind::VEX;
    if vex || matches!(instruction.mnemonic(), Tzcnt | Lzcnt | Movbe) {
        let unit = later_unit(instruction)?;
        return offers(model, instruction).then_some(unit);
    }
    let known = |feature: &CpuidFeature| {
        matches!(
            feature,
            SSE | SSE2
                | SSE3
                | SSSE3
                | SSE4_1
                | SSE4_2
                | AES
                | PCLMULQDQ
                | MMX
                | FPU
                | FPU287
                | FPU387
                | CpuidFeature::CMOV
        )
    };
    // FWAIT counts as an instruction of the 8086.
    let is_known = instruction.mnemonic() == Wait || features.iter().all(known);
    if !is_known || !offers(model, instruction) {
        return None;
    }
    let registers = (0..instruction.op_count())
        .filter(|&operand| instruction.op_kind(operand) == OpKind::Register)
        .map(|operand| instruction.op_register(operand));
    let (mut mm, mut xmm) = (false, false);
    for register in registers {
        mm |= register.is_mm();
        xmm |= register.is_xmm();
    }
    let x87 = features
        .iter()
        .any(|feature| matches!(feature, FPU | FPU287 | FPU387));
    match instruction.mnemonic() {
        // They fault, or their operands are not in the x87 or SSE state alone.
        Fxsave | Fxsave64 | Fxrstor | Fxrstor64 | Ldmxcsr | Stmxcsr => None,
        // State in formats that depend on the mode of the CPU.
        Fldenv | Fldcw | Fnstenv | Fnstcw | Fnstsw | Fnsave | Frstor | Fninit | Fnclex => {
            Some(Unit::X87Control)
        }
        // With a memory operand too, they switch the x87 state to MMX.
        Emms | Wait | Cvtpi2ps | Cvtpi2pd | Fisttp => Some(Unit::X87),
        _ if mm || x87 => Some(Unit::X87),
        _ if xmm => Some(Unit::Sse),
        // From memory to a general register.
        Cvtss2si | Cvtsd2si | Cvttss2si | Cvttsd2si => Some(Unit::Sse),
        _ => None,
    }
}

/// Whether an x87 or MMX instruction raises #MF for a pending exception
/// (Intel SDM volume 1, 8.3.12).
pub(super) fn waits(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    !matches!(
        mnemonic,
        Fninit | Fnstenv | Fnsave | Fnstsw | Fnstcw | Fnclex
    )
}

/// Whether an SSE instruction may set exception flags in MXCSR or is rounded by
/// it (Intel SDM volume 1, 11.5.2).
pub fn raises_simd_exceptions(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Addps
            | Addpd
            | Addss
            | Addsd
            | Subps
            | Subpd
            | Subss
            | Subsd
            | Mulps
            | Mulpd
            | Mulss
            | Mulsd
            | Divps
            | Divpd
            | Divss
            | Divsd
            | Sqrtps
            | Sqrtpd
            | Sqrtss
            | Sqrtsd
            | Minps
            | Minpd
            | Minss
            | Minsd
            | Maxps
            | Maxpd
            | Maxss
            | Maxsd
            | Cmpps
            | Cmppd
            | Cmpss
            | Cmpsd
            | Comiss
            | Comisd
            | Ucomiss
            | Ucomisd
            | Cvtdq2ps
            | Cvtpd2dq
            | Cvtpd2ps
            | Cvtps2dq
            | Cvtps2pd
            | Cvtsd2si
            | Cvtsd2ss
            | Cvtsi2sd
            | Cvtsi2ss
            | Cvtss2sd
            | Cvtss2si
            | Cvttpd2dq
            | Cvttps2dq
            | Cvttsd2si
            | Cvttss2si
            | Addsubps
            | Addsubpd
            | Haddps
            | Haddpd
            | Hsubps
            | Hsubpd
            | Roundps
            | Roundpd
            | Roundss
            | Roundsd
            | Dpps
            | Dppd
    )
}

/// Whether one of the model's SSE instructions works on XMM and general registers and
/// memory alone, so that generated code may contain it as it is.
pub fn is_plain_sse(instruction: &Instruction, model: CpuModel) -> bool {
    // Conversions from memory to a general register name no XMM register, so they
    // would run without the guest's MXCSR.
    let named = (0..instruction.op_count()).any(|operand| {
        instruction.op_kind(operand) == OpKind::Register
            && instruction.op_register(operand).is_xmm()
    });
    named
        && unit_of(instruction, model) == Some(Unit::Sse)
        && instruction.code() != Code::Maskmovdqu_rDI_xmm_xmm
}
