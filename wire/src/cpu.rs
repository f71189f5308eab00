//! What this CPU and its kernel offer to programs, asked from the CPU itself.
//!
//! Names are those of `/proc/cpuinfo`. Listed are the features that change what
//! a program may execute; features for kernels only are not.

use core::arch::asm;
use core::arch::x86_64::{__cpuid, __cpuid_count, CpuidResult};

#[derive(Clone, Copy)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

/// One register of one leaf, and what its bits mean.
struct Word {
    leaf: u32,
    subleaf: u32,
    register: Register,
    bits: &'static [(u32, &'static str)],
}

/// XCR0's bit for the tile data of AMX, which a program must ask for.
const XTILEDATA: u32 = 18;
/// `arch_prctl`: the extended state that this process may use.
const ARCH_GET_XCOMP_PERM: usize = 0x1022;

fn leaf(leaf: u32, subleaf: u32) -> Option<CpuidResult> {
    let range = leaf & 0xffff_0000;
    (leaf <= __cpuid(range).eax).then(|| __cpuid_count(leaf, subleaf))
}

/// Names of the features that are present, in the order of the table.
pub fn features() -> Vec<String> {
    let mut names = Vec::new();
    for word in WORDS {
        let Some(result) = leaf(word.leaf, word.subleaf) else {
            continue;
        };
        let value = match word.register {
            Register::Eax => result.eax,
            Register::Ebx => result.ebx,
            Register::Ecx => result.ecx,
            Register::Edx => result.edx,
        };
        let present = word.bits.iter().filter(|(bit, _)| value >> bit & 1 == 1);
        names.extend(present.map(|(_, name)| (*name).to_owned()));
    }
    names
}

/// The CPU's name, as it gives it.
pub fn name() -> String {
    let words = (0x8000_0002..=0x8000_0004).filter_map(|number| leaf(number, 0));
    let bytes: Vec<u8> = words
        .flat_map(|r| [r.eax, r.ebx, r.ecx, r.edx])
        .flat_map(u32::to_le_bytes)
        .take_while(|byte| *byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

/// The components of extended state that the kernel has switched on; 0 when the
/// CPU has no XSAVE.
pub fn xcr0() -> u64 {
    let osxsave = leaf(1, 0).is_some_and(|result| result.ecx >> 27 & 1 == 1);
    if !osxsave {
        return 0;
    }
    let (low, high): (u32, u32);
    // SAFETY: the OSXSAVE bit says that the instruction exists; it only reads.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack));
    }
    u64::from(high) << 32 | u64::from(low)
}

/// Bytes of extended state that the kernel writes into a signal frame of a
/// process that asked for nothing more: the end of the last component in the
/// standard format (Intel SDM volume 1, section 13.4.3).
pub fn signal_frame_xstate_bytes() -> u32 {
    /// The legacy area and the header.
    const LEAST: u32 = 512 + 64;
    let enabled = xcr0() & permitted();
    (2..63)
        .filter(|component| enabled >> component & 1 == 1)
        .filter_map(|component| leaf(0xd, component))
        .map(|size_and_offset| size_and_offset.eax + size_and_offset.ebx)
        .fold(LEAST, u32::max)
}

fn permitted() -> u64 {
    let mut bits = 0u64;
    // SAFETY: the kernel writes one word into a live local; kernels before 5.16
    // refuse the code.
    let refused = unsafe {
        syscalls::raw::syscall2(
            syscalls::Sysno::arch_prctl as usize,
            ARCH_GET_XCOMP_PERM,
            (&raw mut bits) as usize,
        )
    };
    if refused != 0 {
        return !(1 << XTILEDATA);
    }
    bits
}

#[rustfmt::skip]
const WORDS: &[Word] = &[
    Word {
        leaf: 0x1,
        subleaf: 0,
        register: Register::Ecx,
        bits: &[
            (0, "sse3"),
            (1, "pclmulqdq"),
            (9, "ssse3"),
            (12, "fma"),
            (13, "cx16"),
            (19, "sse4_1"),
            (20, "sse4_2"),
            (22, "movbe"),
            (23, "popcnt"),
            (25, "aes"),
            (26, "xsave"),
            (27, "osxsave"),
            (28, "avx"),
            (29, "f16c"),
            (30, "rdrand"),
        ],
    },
    Word {
        leaf: 0x1,
        subleaf: 0,
        register: Register::Edx,
        bits: &[
            (0, "fpu"),
            (4, "tsc"),
            (8, "cx8"),
            (11, "sep"),
            (15, "cmov"),
            (19, "clflush"),
            (23, "mmx"),
            (24, "fxsr"),
            (25, "sse"),
            (26, "sse2"),
        ],
    },
    Word {
        leaf: 0x7,
        subleaf: 0,
        register: Register::Ebx,
        bits: &[
            (0, "fsgsbase"),
            (3, "bmi1"),
            (4, "hle"),
            (5, "avx2"),
            (8, "bmi2"),
            (9, "erms"),
            (11, "rtm"),
            (14, "mpx"),
            (16, "avx512f"),
            (17, "avx512dq"),
            (18, "rdseed"),
            (19, "adx"),
            (21, "avx512ifma"),
            (23, "clflushopt"),
            (24, "clwb"),
            (26, "avx512pf"),
            (27, "avx512er"),
            (28, "avx512cd"),
            (29, "sha_ni"),
            (30, "avx512bw"),
            (31, "avx512vl"),
        ],
    },
    Word {
        leaf: 0x7,
        subleaf: 0,
        register: Register::Ecx,
        bits: &[
            (0, "prefetchwt1"),
            (1, "avx512vbmi"),
            (3, "pku"),
            (4, "ospke"),
            (5, "waitpkg"),
            (6, "avx512_vbmi2"),
            (8, "gfni"),
            (9, "vaes"),
            (10, "vpclmulqdq"),
            (11, "avx512_vnni"),
            (12, "avx512_bitalg"),
            (14, "avx512_vpopcntdq"),
            (22, "rdpid"),
            (25, "cldemote"),
            (27, "movdiri"),
            (28, "movdir64b"),
        ],
    },
    Word {
        leaf: 0x7,
        subleaf: 0,
        register: Register::Edx,
        bits: &[
            (2, "avx512_4vnniw"),
            (3, "avx512_4fmaps"),
            (4, "fsrm"),
            (5, "uintr"),
            (8, "avx512_vp2intersect"),
            (14, "serialize"),
            (16, "tsxldtrk"),
            (22, "amx_bf16"),
            (23, "avx512_fp16"),
            (24, "amx_tile"),
            (25, "amx_int8"),
        ],
    },
    Word {
        leaf: 0x7,
        subleaf: 1,
        register: Register::Eax,
        bits: &[
            (0, "sha512"),
            (1, "sm3"),
            (2, "sm4"),
            (4, "avx_vnni"),
            (5, "avx512_bf16"),
            (7, "cmpccxadd"),
            (10, "fzrm"),
            (11, "fsrs"),
            (12, "fsrc"),
            (21, "amx_fp16"),
            (23, "avx_ifma"),
            (31, "movrs"),
        ],
    },
    Word {
        leaf: 0x7,
        subleaf: 1,
        register: Register::Edx,
        bits: &[
            (4, "avx_vnni_int8"),
            (5, "avx_ne_convert"),
            (8, "amx_complex"),
            (10, "avx_vnni_int16"),
            (14, "prefetchi"),
            (19, "avx10"),
            (21, "apx_f"),
        ],
    },
    Word {
        leaf: 0xd,
        subleaf: 1,
        register: Register::Eax,
        bits: &[
            (0, "xsaveopt"),
            (1, "xsavec"),
            (2, "xgetbv1"),
        ],
    },
    Word {
        leaf: 0x8000_0001,
        subleaf: 0,
        register: Register::Ecx,
        bits: &[
            (0, "lahf_lm"),
            (5, "abm"),
            (6, "sse4a"),
            (8, "3dnowprefetch"),
            (11, "xop"),
            (15, "lwp"),
            (16, "fma4"),
            (21, "tbm"),
            (29, "mwaitx"),
        ],
    },
    Word {
        leaf: 0x8000_0001,
        subleaf: 0,
        register: Register::Edx,
        bits: &[
            (11, "syscall"),
            (20, "nx"),
            (22, "mmxext"),
            (26, "pdpe1gb"),
            (27, "rdtscp"),
            (29, "lm"),
            (30, "3dnowext"),
            (31, "3dnow"),
        ],
    },
    Word {
        leaf: 0x8000_0008,
        subleaf: 0,
        register: Register::Ebx,
        bits: &[
            (0, "clzero"),
            (9, "wbnoinvd"),
        ],
    },
]
;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_agrees() {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let flags = text.lines().find(|line| line.starts_with("flags")).unwrap();
        let flags: Vec<&str> = flags.split_whitespace().collect();
        // What the kernel lists is present; it hides some that are.
        for word in WORDS {
            for (_, name) in word.bits {
                let ours = features().iter().any(|f| f == name);
                assert!(ours || !flags.contains(name), "{name} is missing");
            }
        }
    }

    #[test]
    fn a_signal_frame_is_as_long_as_said() {
        use std::sync::atomic::{AtomicU32, Ordering};
        static SEEN: AtomicU32 = AtomicU32::new(0);
        extern "C" fn handler(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
            // SAFETY: the kernel hands a ucontext to a SA_SIGINFO handler, whose
            // floating-point area holds `xstate_size` at byte 464 + 16.
            let bytes = unsafe {
                let context = &*context.cast::<libc::ucontext_t>();
                context
                    .uc_mcontext
                    .fpregs
                    .cast::<u8>()
                    .add(464 + 16)
                    .cast::<u32>()
                    .read()
            };
            SEEN.store(bytes, Ordering::SeqCst);
        }
        // SAFETY: the handler only reads its frame and stores an atomic.
        unsafe {
            let mut action: libc::sigaction = core::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGUSR2, &action, core::ptr::null_mut());
            libc::raise(libc::SIGUSR2);
        }
        assert_eq!(SEEN.load(Ordering::SeqCst), signal_frame_xstate_bytes());
    }
}
