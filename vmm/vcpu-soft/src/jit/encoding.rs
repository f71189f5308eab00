//! An instruction of 64-bit code taken apart, so that it can be written again
//! with other operands (Intel SDM volume 2, 2.1 and 2.2).

use super::assembler::Opcode;

/// The ModRM byte's fields, with their REX bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModRm {
    /// Register, or part of the opcode.
    pub reg: u8,
    /// The r/m field's register; `None` for a memory operand.
    pub register: Option<u8>,
}

/// The parts of one instruction's encoding that stay when operands change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoding<'a> {
    /// Opcode with its prefixes; REX.W is `wide`, any REX at all `low_bytes`.
    pub opcode: Opcode,
    /// It has prefixes other than REX.
    pub prefixed: bool,
    /// F2 or F3, where `opcode` does not count it as part of itself.
    pub repeat: u8,
    /// Operands, where there is a ModRM byte.
    pub modrm: Option<ModRm>,
    /// REX.B, for opcodes with a register in their low bits.
    pub opcode_register: u8,
    /// The immediate operand's bytes.
    pub immediate: &'a [u8],
}

impl<'a> Encoding<'a> {
    /// Takes one whole instruction apart; `None` for VEX and the like, and for
    /// what is no instruction of 64-bit code.
    pub fn of(bytes: &'a [u8]) -> Option<Self> {
        let mut at = 0;
        let (mut size, mut repeat, mut lock) = (0, 0, false);
        loop {
            match bytes.get(at)? {
                0x66 => size = 0x66,
                0xf0 => lock = true,
                prefix @ (0xf2 | 0xf3) => repeat = *prefix,
                0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65 | 0x67 => {}
                _ => break,
            }
            at += 1;
        }
        let prefixed = at != 0;
        let rex = match bytes.get(at)? {
            rex @ 0x40..=0x4f => {
                at += 1;
                *rex
            }
            _ => 0,
        };
        let (code, length) = opcode_bytes(bytes.get(at..)?)?;
        at += usize::from(length);
        // F2 and F3 choose among the SSE instructions of map 0F, but for the few
        // integer instructions there.
        let mandatory = length > 1 && repeat != 0 && !is_integer(code[1]);
        let opcode = Opcode {
            // REX.W makes 66 mean nothing: an immediate keeps its length.
            prefix: match length {
                _ if mandatory => repeat,
                1 if rex & 8 != 0 => 0,
                _ => size,
            },
            lock,
            wide: rex & 8 != 0,
            low_bytes: rex != 0,
            bytes: code,
            length,
        };
        let mut modrm = None;
        if has_modrm(code, length) {
            let byte = *bytes.get(at)?;
            at += 1;
            let mode = byte >> 6;
            let register = (mode == 3).then_some(byte & 7 | (rex & 1) << 3);
            if register.is_none() {
                let mut displacement = [0, 1, 4][usize::from(mode)];
                if byte & 7 == 4 {
                    let sib = *bytes.get(at)?;
                    at += 1;
                    if mode == 0 && sib & 7 == 5 {
                        displacement = 4;
                    }
                } else if mode == 0 && byte & 7 == 5 {
                    displacement = 4;
                }
                at += displacement;
            }
            modrm = Some(ModRm {
                reg: byte >> 3 & 7 | (rex & 4) << 1,
                register,
            });
        }
        Some(Self {
            opcode,
            prefixed,
            repeat: if mandatory { 0 } else { repeat },
            modrm,
            opcode_register: (rex & 1) << 3,
            immediate: bytes.get(at..)?,
        })
    }
}

fn opcode_bytes(bytes: &[u8]) -> Option<([u8; 3], u8)> {
    match *bytes {
        // A prefix after REX, which then counts for nothing: nobody writes that.
        [
            0x66 | 0x67 | 0xf0 | 0xf2 | 0xf3 | 0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65,
            ..,
        ] => None,
        [0x40..=0x4f, ..] => None,
        [0x0f, map @ (0x38 | 0x3a), opcode, ..] => Some(([0x0f, map, opcode], 3)),
        [0x0f, opcode, ..] => Some(([0x0f, opcode, 0], 2)),
        // VEX and EVEX.
        [0xc4 | 0xc5 | 0x62, ..] => None,
        [opcode, ..] => Some(([opcode, 0, 0], 1)),
        [] => None,
    }
}

/// Instructions of map 0F on general registers, where F2 and F3 mean nothing
/// (for BSF and BSR on a CPU without TZCNT and LZCNT).
fn is_integer(opcode: u8) -> bool {
    matches!(
        opcode,
        0x1f | 0x18 | 0x0d | 0x19..=0x1e | 0x40..=0x4f | 0x80..=0x9f | 0xa0..=0xaf | 0xb0..=0xb7
            | 0xba..=0xc1 | 0xc3 | 0xc7..=0xcf
    )
}

fn has_modrm(code: [u8; 3], length: u8) -> bool {
    match length {
        1 => {
            matches!(
                code[0],
                0x63 | 0x69 | 0x6b | 0x80..=0x8f | 0xc0 | 0xc1 | 0xc6 | 0xc7 | 0xd0..=0xd3
                    | 0xd8..=0xdf | 0xf6 | 0xf7 | 0xfe | 0xff
            ) || code[0] < 0x40 && code[0] & 7 < 4
        }
        2 => !matches!(
            code[1],
            0x05..=0x09 | 0x0b | 0x30..=0x37 | 0x77 | 0x80..=0x8f | 0xa0..=0xa2 | 0xa8..=0xaa
                | 0xc8..=0xcf
        ),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(bytes: &[u8]) -> (u8, bool, Option<ModRm>, usize) {
        let encoding = Encoding::of(bytes).unwrap();
        (
            encoding.opcode.prefix,
            encoding.opcode.wide,
            encoding.modrm,
            encoding.immediate.len(),
        )
    }

    #[test]
    fn takes_instructions_apart() {
        let memory = |reg| {
            Some(ModRm {
                reg,
                register: None,
            })
        };
        // add dword ptr [rbp+8*r12+0x100], 0x1234
        let add = [0x42, 0x81, 0x84, 0xe5, 0, 1, 0, 0, 0x34, 0x12, 0, 0];
        assert_eq!(parts(&add), (0, false, memory(0), 4));
        // mov r9, [rip+0]
        assert_eq!(
            parts(&[0x4c, 0x8b, 0x0d, 0, 0, 0, 0]),
            (0, true, memory(9), 0)
        );
        // cvtsi2sd xmm1, r10
        let register = Some(ModRm {
            reg: 1,
            register: Some(10),
        });
        assert_eq!(
            parts(&[0xf2, 0x49, 0x0f, 0x2a, 0xca]),
            (0xf2, true, register, 0)
        );
        // rep bsf eax, ecx: the prefix is not the opcode's.
        let bsf = Encoding::of(&[0xf3, 0x0f, 0xbc, 0xc1]).unwrap();
        assert_eq!((bsf.opcode.prefix, bsf.repeat), (0, 0xf3));
        // mov word ptr [rax], imm16
        assert_eq!(
            parts(&[0x66, 0xc7, 0x00, 1, 2]),
            (0x66, false, memory(0), 2)
        );
    }

    #[test]
    fn truncated_instructions_are_refused() {
        let add = [0x42, 0x81, 0x84, 0xe5, 0, 1, 0, 0, 0x34, 0x12, 0, 0];
        for length in 0..8 {
            assert_eq!(Encoding::of(&add[..length]), None, "{length}");
        }
    }
}
