//! Model-specific registers that are the vCPU's own.

/// What RDMSR and WRMSR reach, apart from the segment bases, EFER and the TSC.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Msrs {
    /// IA32_STAR: selectors of SYSCALL and SYSRET.
    pub star: u64,
    /// IA32_LSTAR: entry of 64-bit SYSCALL.
    pub lstar: u64,
    /// IA32_CSTAR: entry of SYSCALL from compatibility mode.
    pub cstar: u64,
    /// IA32_FMASK: flags that SYSCALL clears.
    pub sfmask: u64,
    /// IA32_KERNEL_GS_BASE.
    pub kernel_gs_base: u64,
    /// IA32_TSC_AUX: what RDTSCP puts into ECX.
    pub tsc_aux: u64,
    /// IA32_PAT: kept, without effect.
    pub pat: u64,
    /// Registers that are kept and have no effect: by number.
    pub kept: Vec<(u32, u64)>,
}
