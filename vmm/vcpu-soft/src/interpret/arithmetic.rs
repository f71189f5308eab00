//! Arithmetic by the host's own instructions, flags included.
//!
//! Every function executes the guest's instruction on the host with the guest's
//! flags in force where it reads or keeps any, and takes the flags back in the
//! format of [`crate::flags`]. So results are exact by construction, flags that
//! the manual calls undefined included.

use std::arch::asm;

/// Numbers of the two-operand instructions, as in their opcodes; TEST is last.
pub mod operation {
    /// ADD
    pub const ADD: u8 = 0;
    /// OR
    pub const OR: u8 = 1;
    /// ADC
    pub const ADC: u8 = 2;
    /// SBB
    pub const SBB: u8 = 3;
    /// AND
    pub const AND: u8 = 4;
    /// SUB
    pub const SUB: u8 = 5;
    /// XOR
    pub const XOR: u8 = 6;
    /// CMP
    pub const CMP: u8 = 7;
    /// TEST
    pub const TEST: u8 = 8;
}

/// `mnemonic a, b` on registers; all flags are replaced.
macro_rules! on_registers {
    ($size:ident, $mnemonic:literal, $a:ident, $b:ident, $flags:ident) => {{
        let result: u64;
        let flags: u64;
        // SAFETY: arithmetic on registers.
        unsafe {
            match $size {
                1 => asm!(concat!($mnemonic, " {a:l}, {b:l}"), "lahf", "seto al",
                    a = inout(reg) $a => result, b = in(reg) $b, out("rax") flags,
                    options(pure, nomem, nostack)),
                2 => asm!(concat!($mnemonic, " {a:x}, {b:x}"), "lahf", "seto al",
                    a = inout(reg) $a => result, b = in(reg) $b, out("rax") flags,
                    options(pure, nomem, nostack)),
                4 => asm!(concat!($mnemonic, " {a:e}, {b:e}"), "lahf", "seto al",
                    a = inout(reg) $a => result, b = in(reg) $b, out("rax") flags,
                    options(pure, nomem, nostack)),
                _ => asm!(concat!($mnemonic, " {a}, {b}"), "lahf", "seto al",
                    a = inout(reg) $a => result, b = in(reg) $b, out("rax") flags,
                    options(pure, nomem, nostack)),
            }
        }
        *$flags = flags;
        result
    }};
}

/// `mnemonic a, b` on registers, with the guest's flags in force before.
macro_rules! on_registers_with_flags {
    ($size:ident, $mnemonic:literal, $a:ident, $b:ident, $flags:ident) => {{
        let result: u64;
        let flags: u64;
        // SAFETY: arithmetic on registers.
        unsafe {
            match $size {
                1 => asm!("add al, 127", "sahf", concat!($mnemonic, " {a:l}, {b:l}"),
                    "lahf", "seto al",
                    a = inout(reg) $a => result, b = in(reg) $b, inout("rax") *$flags => flags,
                    options(pure, nomem, nostack)),
                2 => asm!("add al, 127", "sahf", concat!($mnemonic, " {a:x}, {b:x}"),
                    "lahf", "seto al",
                    a = inout(reg) $a => result, b = in(reg) $b, inout("rax") *$flags => flags,
                    options(pure, nomem, nostack)),
                4 => asm!("add al, 127", "sahf", concat!($mnemonic, " {a:e}, {b:e}"),
                    "lahf", "seto al",
                    a = inout(reg) $a => result, b = in(reg) $b, inout("rax") *$flags => flags,
                    options(pure, nomem, nostack)),
                _ => asm!("add al, 127", "sahf", concat!($mnemonic, " {a}, {b}"),
                    "lahf", "seto al",
                    a = inout(reg) $a => result, b = in(reg) $b, inout("rax") *$flags => flags,
                    options(pure, nomem, nostack)),
            }
        }
        *$flags = flags;
        result
    }};
}

/// `mnemonic [p], b` in memory, with the guest's flags in force before.
macro_rules! on_memory {
    ($size:ident, $mnemonic:literal, $pointer:ident, $b:ident, $flags:ident) => {{
        let flags: u64;
        // SAFETY: the caller's promise about the pointer.
        unsafe {
            match $size {
                1 => asm!("add al, 127", "sahf", concat!($mnemonic, " byte ptr [{p}], {b:l}"),
                    "lahf", "seto al",
                    p = in(reg) $pointer, b = in(reg) $b, inout("rax") *$flags => flags,
                    options(nostack)),
                2 => asm!("add al, 127", "sahf", concat!($mnemonic, " word ptr [{p}], {b:x}"),
                    "lahf", "seto al",
                    p = in(reg) $pointer, b = in(reg) $b, inout("rax") *$flags => flags,
                    options(nostack)),
                4 => asm!("add al, 127", "sahf", concat!($mnemonic, " dword ptr [{p}], {b:e}"),
                    "lahf", "seto al",
                    p = in(reg) $pointer, b = in(reg) $b, inout("rax") *$flags => flags,
                    options(nostack)),
                _ => asm!("add al, 127", "sahf", concat!($mnemonic, " qword ptr [{p}], {b}"),
                    "lahf", "seto al",
                    p = in(reg) $pointer, b = in(reg) $b, inout("rax") *$flags => flags,
                    options(nostack)),
            }
        }
        *$flags = flags;
    }};
}

/// `mnemonic [p]` in memory, with the guest's flags in force before.
macro_rules! on_memory_alone {
    ($size:ident, $mnemonic:literal, $pointer:ident, $flags:ident) => {{
        let flags: u64;
        // SAFETY: the caller's promise about the pointer.
        unsafe {
            match $size {
                1 => asm!("add al, 127", "sahf", concat!($mnemonic, " byte ptr [{p}]"),
                    "lahf", "seto al",
                    p = in(reg) $pointer, inout("rax") *$flags => flags, options(nostack)),
                2 => asm!("add al, 127", "sahf", concat!($mnemonic, " word ptr [{p}]"),
                    "lahf", "seto al",
                    p = in(reg) $pointer, inout("rax") *$flags => flags, options(nostack)),
                4 => asm!("add al, 127", "sahf", concat!($mnemonic, " dword ptr [{p}]"),
                    "lahf", "seto al",
                    p = in(reg) $pointer, inout("rax") *$flags => flags, options(nostack)),
                _ => asm!("add al, 127", "sahf", concat!($mnemonic, " qword ptr [{p}]"),
                    "lahf", "seto al",
                    p = in(reg) $pointer, inout("rax") *$flags => flags, options(nostack)),
            }
        }
        *$flags = flags;
    }};
}

/// Two operands in registers: the result, and the flags.
#[inline(always)]
pub fn binary<const OPERATION: u8, const SIZE: usize>(a: u64, b: u64, flags: &mut u64) -> u64 {
    match OPERATION {
        operation::ADD => on_registers!(SIZE, "add", a, b, flags),
        operation::OR => on_registers!(SIZE, "or", a, b, flags),
        operation::ADC => on_registers_with_flags!(SIZE, "adc", a, b, flags),
        operation::SBB => on_registers_with_flags!(SIZE, "sbb", a, b, flags),
        operation::AND => on_registers!(SIZE, "and", a, b, flags),
        operation::SUB => on_registers!(SIZE, "sub", a, b, flags),
        operation::XOR => on_registers!(SIZE, "xor", a, b, flags),
        operation::CMP => on_registers!(SIZE, "cmp", a, b, flags),
        _ => on_registers!(SIZE, "test", a, b, flags),
    }
}

/// The first operand in memory; those that write only.
///
/// # Safety
///
/// `SIZE` bytes at `pointer` are mapped and writable.
#[inline(always)]
pub unsafe fn binary_memory<const OPERATION: u8, const SIZE: usize, const LOCK: bool>(
    pointer: *mut u8,
    b: u64,
    flags: &mut u64,
) {
    match (OPERATION, LOCK) {
        (operation::ADD, false) => on_memory!(SIZE, "add", pointer, b, flags),
        (operation::OR, false) => on_memory!(SIZE, "or", pointer, b, flags),
        (operation::ADC, false) => on_memory!(SIZE, "adc", pointer, b, flags),
        (operation::SBB, false) => on_memory!(SIZE, "sbb", pointer, b, flags),
        (operation::AND, false) => on_memory!(SIZE, "and", pointer, b, flags),
        (operation::SUB, false) => on_memory!(SIZE, "sub", pointer, b, flags),
        (_, false) => on_memory!(SIZE, "xor", pointer, b, flags),
        (operation::ADD, true) => on_memory!(SIZE, "lock add", pointer, b, flags),
        (operation::OR, true) => on_memory!(SIZE, "lock or", pointer, b, flags),
        (operation::ADC, true) => on_memory!(SIZE, "lock adc", pointer, b, flags),
        (operation::SBB, true) => on_memory!(SIZE, "lock sbb", pointer, b, flags),
        (operation::AND, true) => on_memory!(SIZE, "lock and", pointer, b, flags),
        (operation::SUB, true) => on_memory!(SIZE, "lock sub", pointer, b, flags),
        (_, true) => on_memory!(SIZE, "lock xor", pointer, b, flags),
    }
}

/// Numbers of the one-operand instructions.
pub mod unary {
    /// INC
    pub const INC: u8 = 0;
    /// DEC
    pub const DEC: u8 = 1;
    /// NEG
    pub const NEG: u8 = 2;
    /// NOT
    pub const NOT: u8 = 3;
}

/// One operand in a register.
#[inline(always)]
pub fn unary<const OPERATION: u8, const SIZE: usize>(a: u64, flags: &mut u64) -> u64 {
    macro_rules! one {
        ($mnemonic:literal) => {{
            let result: u64;
            let out: u64;
            // SAFETY: arithmetic on registers.
            unsafe {
                match SIZE {
                    1 => asm!("bt eax, 8", concat!($mnemonic, " {a:l}"), "lahf", "seto al",
                        a = inout(reg) a => result, inout("rax") *flags => out,
                        options(pure, nomem, nostack)),
                    2 => asm!("bt eax, 8", concat!($mnemonic, " {a:x}"), "lahf", "seto al",
                        a = inout(reg) a => result, inout("rax") *flags => out,
                        options(pure, nomem, nostack)),
                    4 => asm!("bt eax, 8", concat!($mnemonic, " {a:e}"), "lahf", "seto al",
                        a = inout(reg) a => result, inout("rax") *flags => out,
                        options(pure, nomem, nostack)),
                    _ => asm!("bt eax, 8", concat!($mnemonic, " {a}"), "lahf", "seto al",
                        a = inout(reg) a => result, inout("rax") *flags => out,
                        options(pure, nomem, nostack)),
                }
            }
            *flags = out;
            result
        }};
    }
    match OPERATION {
        unary::INC => one!("inc"),
        unary::DEC => one!("dec"),
        unary::NEG => one!("neg"),
        _ => !a,
    }
}

/// One operand in memory.
///
/// # Safety
///
/// `SIZE` bytes at `pointer` are mapped and writable.
#[inline(always)]
pub unsafe fn unary_memory<const OPERATION: u8, const SIZE: usize, const LOCK: bool>(
    pointer: *mut u8,
    flags: &mut u64,
) {
    match (OPERATION, LOCK) {
        (unary::INC, false) => on_memory_alone!(SIZE, "inc", pointer, flags),
        (unary::DEC, false) => on_memory_alone!(SIZE, "dec", pointer, flags),
        (unary::NEG, false) => on_memory_alone!(SIZE, "neg", pointer, flags),
        (_, false) => on_memory_alone!(SIZE, "not", pointer, flags),
        (unary::INC, true) => on_memory_alone!(SIZE, "lock inc", pointer, flags),
        (unary::DEC, true) => on_memory_alone!(SIZE, "lock dec", pointer, flags),
        (unary::NEG, true) => on_memory_alone!(SIZE, "lock neg", pointer, flags),
        (_, true) => on_memory_alone!(SIZE, "lock not", pointer, flags),
    }
}

/// Numbers of the shifts and rotations, as in their opcodes.
pub mod shift {
    /// ROL
    pub const ROL: u8 = 0;
    /// ROR
    pub const ROR: u8 = 1;
    /// RCL
    pub const RCL: u8 = 2;
    /// RCR
    pub const RCR: u8 = 3;
    /// SHL
    pub const SHL: u8 = 4;
    /// SHR
    pub const SHR: u8 = 5;
    /// SAR
    pub const SAR: u8 = 7;
}

/// A shift or rotation by `count`, of which the instruction looks at the low
/// byte.
#[inline(always)]
pub fn shifted<const OPERATION: u8, const SIZE: usize>(a: u64, count: u64, flags: &mut u64) -> u64 {
    macro_rules! by_cl {
        ($mnemonic:literal) => {{
            let result: u64;
            let out: u64;
            // SAFETY: arithmetic on registers.
            unsafe {
                match SIZE {
                    1 => asm!("add al, 127", "sahf", concat!($mnemonic, " {a:l}, cl"),
                        "lahf", "seto al", a = inout(reg) a => result, in("rcx") count,
                        inout("rax") *flags => out, options(pure, nomem, nostack)),
                    2 => asm!("add al, 127", "sahf", concat!($mnemonic, " {a:x}, cl"),
                        "lahf", "seto al", a = inout(reg) a => result, in("rcx") count,
                        inout("rax") *flags => out, options(pure, nomem, nostack)),
                    4 => asm!("add al, 127", "sahf", concat!($mnemonic, " {a:e}, cl"),
                        "lahf", "seto al", a = inout(reg) a => result, in("rcx") count,
                        inout("rax") *flags => out, options(pure, nomem, nostack)),
                    _ => asm!("add al, 127", "sahf", concat!($mnemonic, " {a}, cl"),
                        "lahf", "seto al", a = inout(reg) a => result, in("rcx") count,
                        inout("rax") *flags => out, options(pure, nomem, nostack)),
                }
            }
            *flags = out;
            result
        }};
    }
    match OPERATION {
        shift::ROL => by_cl!("rol"),
        shift::ROR => by_cl!("ror"),
        shift::RCL => by_cl!("rcl"),
        shift::RCR => by_cl!("rcr"),
        shift::SHR => by_cl!("shr"),
        shift::SAR => by_cl!("sar"),
        _ => by_cl!("shl"),
    }
}

/// SHLD, or SHRD where `RIGHT`: `a` with bits of `b` shifted in.
#[inline(always)]
pub fn double_shifted<const RIGHT: bool, const SIZE: usize>(
    a: u64,
    b: u64,
    count: u64,
    flags: &mut u64,
) -> u64 {
    macro_rules! by_cl {
        ($mnemonic:literal) => {{
            let result: u64;
            let out: u64;
            // SAFETY: arithmetic on registers.
            unsafe {
                match SIZE {
                    2 => asm!("add al, 127", "sahf", concat!($mnemonic, " {a:x}, {b:x}, cl"),
                        "lahf", "seto al", a = inout(reg) a => result, b = in(reg) b,
                        in("rcx") count, inout("rax") *flags => out,
                        options(pure, nomem, nostack)),
                    4 => asm!("add al, 127", "sahf", concat!($mnemonic, " {a:e}, {b:e}, cl"),
                        "lahf", "seto al", a = inout(reg) a => result, b = in(reg) b,
                        in("rcx") count, inout("rax") *flags => out,
                        options(pure, nomem, nostack)),
                    _ => asm!("add al, 127", "sahf", concat!($mnemonic, " {a}, {b}, cl"),
                        "lahf", "seto al", a = inout(reg) a => result, b = in(reg) b,
                        in("rcx") count, inout("rax") *flags => out,
                        options(pure, nomem, nostack)),
                }
            }
            *flags = out;
            result
        }};
    }
    if RIGHT {
        by_cl!("shrd")
    } else {
        by_cl!("shld")
    }
}

/// Numbers of instructions on single bits.
pub mod bit {
    /// BT
    pub const TEST: u8 = 0;
    /// BTS
    pub const SET: u8 = 1;
    /// BTR
    pub const RESET: u8 = 2;
    /// BTC
    pub const COMPLEMENT: u8 = 3;
}

/// BT, BTS, BTR, BTC on a register (16, 32 or 64 bits).
#[inline(always)]
pub fn bit_register<const OPERATION: u8, const SIZE: usize>(
    a: u64,
    b: u64,
    flags: &mut u64,
) -> u64 {
    match OPERATION {
        bit::TEST => on_registers_with_flags!(SIZE, "bt", a, b, flags),
        bit::SET => on_registers_with_flags!(SIZE, "bts", a, b, flags),
        bit::RESET => on_registers_with_flags!(SIZE, "btr", a, b, flags),
        _ => on_registers_with_flags!(SIZE, "btc", a, b, flags),
    }
}

/// BTS, BTR, BTC on memory; `b` is less than the operand's bits.
///
/// # Safety
///
/// `SIZE` bytes at `pointer` are mapped and writable.
#[inline(always)]
pub unsafe fn bit_memory<const OPERATION: u8, const SIZE: usize, const LOCK: bool>(
    pointer: *mut u8,
    b: u64,
    flags: &mut u64,
) {
    match (OPERATION, LOCK) {
        (bit::SET, false) => on_memory!(SIZE, "bts", pointer, b, flags),
        (bit::RESET, false) => on_memory!(SIZE, "btr", pointer, b, flags),
        (_, false) => on_memory!(SIZE, "btc", pointer, b, flags),
        (bit::SET, true) => on_memory!(SIZE, "lock bts", pointer, b, flags),
        (bit::RESET, true) => on_memory!(SIZE, "lock btr", pointer, b, flags),
        (_, true) => on_memory!(SIZE, "lock btc", pointer, b, flags),
    }
}

/// BSF, or BSR where `REVERSE`. Where no bit of `b` is set, `a` stays.
#[inline(always)]
pub fn bit_scan<const REVERSE: bool, const SIZE: usize>(a: u64, b: u64, flags: &mut u64) -> u64 {
    if REVERSE {
        on_registers_with_flags!(SIZE, "bsr", a, b, flags)
    } else {
        on_registers_with_flags!(SIZE, "bsf", a, b, flags)
    }
}

/// IMUL with two operands.
#[inline(always)]
pub fn multiply<const SIZE: usize>(a: u64, b: u64, flags: &mut u64) -> u64 {
    on_registers_with_flags!(SIZE, "imul", a, b, flags)
}

/// XADD on registers: the sum for the destination; `b` gets its old value.
#[inline(always)]
pub fn exchange_add<const SIZE: usize>(a: u64, b: &mut u64, flags: &mut u64) -> u64 {
    let sum = binary::<{ operation::ADD }, SIZE>(a, *b, flags);
    *b = a;
    sum
}

/// MUL, IMUL (one operand), DIV or IDIV on the accumulator pair: what is in RAX
/// and RDX afterwards.
///
/// # Safety
///
/// For the divisions, the quotient fits: else the host raises a signal.
#[inline(always)]
pub unsafe fn accumulate<const OPERATION: u8, const SIZE: usize>(
    accumulator: u64,
    high: u64,
    operand: u64,
    flags: &mut u64,
) -> (u64, u64) {
    macro_rules! wide {
        ($mnemonic:literal) => {{
            let low_out: u64;
            let high_out: u64;
            let out: u64;
            // SAFETY: arithmetic on registers, and the caller's promise.
            unsafe {
                match SIZE {
                    1 => asm!("xchg rax, {f}", "add al, 127", "sahf", "xchg rax, {f}",
                        concat!($mnemonic, " {b:l}"), "xchg rax, {f}", "lahf", "seto al",
                        "xchg rax, {f}", b = in(reg) operand, f = inout(reg) *flags => out,
                        inout("rax") accumulator => low_out, inout("rdx") high => high_out,
                        options(pure, nomem, nostack)),
                    2 => asm!("xchg rax, {f}", "add al, 127", "sahf", "xchg rax, {f}",
                        concat!($mnemonic, " {b:x}"), "xchg rax, {f}", "lahf", "seto al",
                        "xchg rax, {f}", b = in(reg) operand, f = inout(reg) *flags => out,
                        inout("rax") accumulator => low_out, inout("rdx") high => high_out,
                        options(pure, nomem, nostack)),
                    4 => asm!("xchg rax, {f}", "add al, 127", "sahf", "xchg rax, {f}",
                        concat!($mnemonic, " {b:e}"), "xchg rax, {f}", "lahf", "seto al",
                        "xchg rax, {f}", b = in(reg) operand, f = inout(reg) *flags => out,
                        inout("rax") accumulator => low_out, inout("rdx") high => high_out,
                        options(pure, nomem, nostack)),
                    _ => asm!("xchg rax, {f}", "add al, 127", "sahf", "xchg rax, {f}",
                        concat!($mnemonic, " {b}"), "xchg rax, {f}", "lahf", "seto al",
                        "xchg rax, {f}", b = in(reg) operand, f = inout(reg) *flags => out,
                        inout("rax") accumulator => low_out, inout("rdx") high => high_out,
                        options(pure, nomem, nostack)),
                }
            }
            *flags = out;
            (low_out, high_out)
        }};
    }
    match OPERATION {
        wide::MUL => wide!("mul"),
        wide::IMUL => wide!("imul"),
        wide::DIV => wide!("div"),
        _ => wide!("idiv"),
    }
}

/// Numbers for [`accumulate`], as in their opcodes.
pub mod wide {
    /// MUL
    pub const MUL: u8 = 4;
    /// IMUL
    pub const IMUL: u8 = 5;
    /// DIV
    pub const DIV: u8 = 6;
    /// IDIV
    pub const IDIV: u8 = 7;
}

/// CMPXCHG on registers: the destination, and the accumulator afterwards.
#[inline(always)]
pub fn compare_exchange_register<const SIZE: usize>(
    destination: u64,
    source: u64,
    accumulator: u64,
    flags: &mut u64,
) -> (u64, u64) {
    let result: u64;
    let after: u64;
    let out: u64;
    // SAFETY: arithmetic on registers.
    unsafe {
        match SIZE {
            1 => asm!("cmpxchg {d:l}, {s:l}", "mov {f}, rax", "lahf", "seto al", "xchg rax, {f}",
                d = inout(reg) destination => result, s = in(reg) source, f = out(reg) out,
                inout("rax") accumulator => after, options(pure, nomem, nostack)),
            2 => asm!("cmpxchg {d:x}, {s:x}", "mov {f}, rax", "lahf", "seto al", "xchg rax, {f}",
                d = inout(reg) destination => result, s = in(reg) source, f = out(reg) out,
                inout("rax") accumulator => after, options(pure, nomem, nostack)),
            4 => asm!("cmpxchg {d:e}, {s:e}", "mov {f}, rax", "lahf", "seto al", "xchg rax, {f}",
                d = inout(reg) destination => result, s = in(reg) source, f = out(reg) out,
                inout("rax") accumulator => after, options(pure, nomem, nostack)),
            _ => asm!("cmpxchg {d}, {s}", "mov {f}, rax", "lahf", "seto al", "xchg rax, {f}",
                d = inout(reg) destination => result, s = in(reg) source, f = out(reg) out,
                inout("rax") accumulator => after, options(pure, nomem, nostack)),
        }
    }
    *flags = out;
    (result, after)
}

/// LOCK CMPXCHG in memory: the accumulator afterwards. Without LOCK too: an
/// atomic instruction is one of the ways to execute one that is not.
///
/// # Safety
///
/// `SIZE` bytes at `pointer` are mapped and writable.
#[inline(always)]
pub unsafe fn compare_exchange_memory<const SIZE: usize>(
    pointer: *mut u8,
    source: u64,
    accumulator: u64,
    flags: &mut u64,
) -> u64 {
    let after: u64;
    let out: u64;
    // SAFETY: the caller's promise.
    unsafe {
        match SIZE {
            1 => asm!("lock cmpxchg byte ptr [{p}], {s:l}", "mov {f}, rax", "lahf", "seto al",
                "xchg rax, {f}", p = in(reg) pointer, s = in(reg) source, f = out(reg) out,
                inout("rax") accumulator => after, options(nostack)),
            2 => asm!("lock cmpxchg word ptr [{p}], {s:x}", "mov {f}, rax", "lahf", "seto al",
                "xchg rax, {f}", p = in(reg) pointer, s = in(reg) source, f = out(reg) out,
                inout("rax") accumulator => after, options(nostack)),
            4 => asm!("lock cmpxchg dword ptr [{p}], {s:e}", "mov {f}, rax", "lahf", "seto al",
                "xchg rax, {f}", p = in(reg) pointer, s = in(reg) source, f = out(reg) out,
                inout("rax") accumulator => after, options(nostack)),
            _ => asm!("lock cmpxchg qword ptr [{p}], {s}", "mov {f}, rax", "lahf", "seto al",
                "xchg rax, {f}", p = in(reg) pointer, s = in(reg) source, f = out(reg) out,
                inout("rax") accumulator => after, options(nostack)),
        }
    }
    *flags = out;
    after
}

/// LOCK XADD in memory: the old value. The flags are those of the addition.
///
/// # Safety
///
/// `SIZE` bytes at `pointer` are mapped and writable.
#[inline(always)]
pub unsafe fn exchange_add_memory<const SIZE: usize>(
    pointer: *mut u8,
    source: u64,
    flags: &mut u64,
) -> u64 {
    let old: u64;
    let out: u64;
    // SAFETY: the caller's promise.
    unsafe {
        match SIZE {
            1 => asm!("lock xadd byte ptr [{p}], {s:l}", "lahf", "seto al", p = in(reg) pointer,
                s = inout(reg) source => old, out("rax") out, options(nostack)),
            2 => asm!("lock xadd word ptr [{p}], {s:x}", "lahf", "seto al", p = in(reg) pointer,
                s = inout(reg) source => old, out("rax") out, options(nostack)),
            4 => asm!("lock xadd dword ptr [{p}], {s:e}", "lahf", "seto al", p = in(reg) pointer,
                s = inout(reg) source => old, out("rax") out, options(nostack)),
            _ => asm!("lock xadd qword ptr [{p}], {s}", "lahf", "seto al", p = in(reg) pointer,
                s = inout(reg) source => old, out("rax") out, options(nostack)),
        }
    }
    *flags = out;
    old
}

/// XCHG in memory, always locked: the old value.
///
/// # Safety
///
/// `SIZE` bytes at `pointer` are mapped and writable.
#[inline(always)]
pub unsafe fn exchange_memory<const SIZE: usize>(pointer: *mut u8, source: u64) -> u64 {
    let old: u64;
    // SAFETY: the caller's promise.
    unsafe {
        match SIZE {
            1 => asm!("xchg byte ptr [{p}], {s:l}", p = in(reg) pointer,
                s = inout(reg) source => old, options(nostack, preserves_flags)),
            2 => asm!("xchg word ptr [{p}], {s:x}", p = in(reg) pointer,
                s = inout(reg) source => old, options(nostack, preserves_flags)),
            4 => asm!("xchg dword ptr [{p}], {s:e}", p = in(reg) pointer,
                s = inout(reg) source => old, options(nostack, preserves_flags)),
            _ => asm!("xchg qword ptr [{p}], {s}", p = in(reg) pointer,
                s = inout(reg) source => old, options(nostack, preserves_flags)),
        }
    }
    old
}

/// LOCK CMPXCHG16B (8B where not `WIDE`): RAX, RDX and ZF afterwards.
///
/// # Safety
///
/// 16 (8) bytes at `pointer` are mapped and writable, and aligned to 16 where
/// `WIDE`.
#[inline(always)]
pub unsafe fn compare_exchange_pair<const WIDE: bool>(
    pointer: *mut u8,
    expected: (u64, u64),
    new: (u64, u64),
) -> (u64, u64, bool) {
    let low: u64;
    let high: u64;
    let equal: u64;
    // SAFETY: the caller's promise; RBX is put back.
    unsafe {
        if WIDE {
            asm!("xchg rbx, rsi", "lock cmpxchg16b [rdi]", "mov rbx, rsi", "sete sil",
                "movzx esi, sil",
                in("rdi") pointer, inout("rsi") new.0 => equal, in("rcx") new.1,
                inout("rax") expected.0 => low, inout("rdx") expected.1 => high,
                options(nostack));
        } else {
            asm!("xchg rbx, rsi", "lock cmpxchg8b [rdi]", "mov rbx, rsi", "sete sil",
                "movzx esi, sil",
                in("rdi") pointer, inout("rsi") new.0 => equal, in("rcx") new.1,
                inout("rax") expected.0 => low, inout("rdx") expected.1 => high,
                options(nostack));
        }
    }
    (low, high, equal != 0)
}
