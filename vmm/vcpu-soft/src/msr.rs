//! Model-specific registers (Intel SDM volume 4). Those of the local APIC and
//! the paravirtual clock are the environment's.

use crate::access::is_canonical;
use crate::cpu::{Cpu, Faulted, segment};

const TSC: u32 = 0x10;
/// IA32_APIC_BASE, which is the environment's.
const APIC_BASE: u32 = 0x1b;
const APIC_ENABLED: u64 = 1 << 11;
const BIOS_SIGN_ID: u32 = 0x8b;
const MTRR_CAPABILITIES: u32 = 0xfe;
const SYSENTER_CS: u32 = 0x174;
const SYSENTER_ESP: u32 = 0x175;
const SYSENTER_EIP: u32 = 0x176;
const MCG_CAPABILITIES: u32 = 0x179;
const MCG_STATUS: u32 = 0x17a;
const MISC_ENABLE: u32 = 0x1a0;
const MTRR_FIRST: u32 = 0x200;
const MTRR_LAST: u32 = 0x20f;
const MTRR_FIXED: [u32; 11] = [
    0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f,
];
const PAT: u32 = 0x277;
const MTRR_DEFAULT_TYPE: u32 = 0x2ff;
const EFER: u32 = 0xc000_0080;
const STAR: u32 = 0xc000_0081;
const LSTAR: u32 = 0xc000_0082;
const CSTAR: u32 = 0xc000_0083;
const SFMASK: u32 = 0xc000_0084;
const FS_BASE: u32 = 0xc000_0100;
const GS_BASE: u32 = 0xc000_0101;
const KERNEL_GS_BASE: u32 = 0xc000_0102;
const TSC_AUX: u32 = 0xc000_0103;
const HWCR: u32 = 0xc001_0015;
/// System configuration: Linux looks there for MTRR options of AMD processors.
const SYSCFG: u32 = 0xc001_0010;
/// Northbridge configuration, which Linux sets a bit of on every AMD processor.
const NB_CFG: u32 = 0xc001_001f;
const PATCH_LEVEL: u32 = BIOS_SIGN_ID;

/// Eight variable ranges, fixed ranges and write combining are there.
const MTRR_CAPABILITIES_VALUE: u64 = 0x508;
/// As firmware leaves it: on, write-back by default.
const MTRR_DEFAULT_TYPE_VALUE: u64 = 0xc06;
/// HWCR.TscFreqSel: the TSC runs at the P0 frequency.
const HWCR_VALUE: u64 = 1 << 24;
/// PAT as after power-on.
pub const PAT_VALUE: u64 = 0x0007_0406_0007_0406;

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
    /// Registers that are kept and have no effect, by number: sorted.
    kept: Vec<(u32, u64)>,
}

/// The value after power-on of a register that is kept and has no effect.
fn kept_default(index: u32) -> Option<u64> {
    Some(match index {
        PAT => PAT_VALUE,
        MTRR_DEFAULT_TYPE => MTRR_DEFAULT_TYPE_VALUE,
        HWCR => HWCR_VALUE,
        // Fast strings.
        MISC_ENABLE => 1,
        SYSENTER_CS | SYSENTER_ESP | SYSENTER_EIP | MCG_STATUS | SYSCFG | NB_CFG => 0,
        MTRR_FIRST..=MTRR_LAST => 0,
        _ if MTRR_FIXED.contains(&index) => 0x0606_0606_0606_0606,
        _ => return None,
    })
}

impl Msrs {
    fn kept(&self, index: u32) -> Option<u64> {
        let default = kept_default(index)?;
        Some(
            match self.kept.binary_search_by_key(&index, |kept| kept.0) {
                Ok(place) => self.kept[place].1,
                Err(_) => default,
            },
        )
    }

    fn keep(&mut self, index: u32, value: u64) -> bool {
        if kept_default(index).is_none() {
            return false;
        }
        match self.kept.binary_search_by_key(&index, |kept| kept.0) {
            Ok(place) => self.kept[place].1 = value,
            Err(place) => self.kept.insert(place, (index, value)),
        }
        true
    }

    /// All that differ from what they are after power-on.
    pub fn save(&self) -> Vec<(u32, u64)> {
        let mut all = vec![
            (STAR, self.star),
            (LSTAR, self.lstar),
            (CSTAR, self.cstar),
            (SFMASK, self.sfmask),
            (KERNEL_GS_BASE, self.kernel_gs_base),
            (TSC_AUX, self.tsc_aux),
            (PAT, PAT_VALUE),
        ];
        for &(index, value) in &self.kept {
            if index == PAT {
                all.retain(|kept| kept.0 != PAT);
            }
            all.push((index, value));
        }
        all
    }

    /// What [`Msrs::save`] gave; the numbers of registers that this CPU does not
    /// have are left out.
    pub fn restore(saved: &[(u32, u64)]) -> Self {
        let mut msrs = Self::default();
        for &(index, value) in saved {
            match index {
                STAR => msrs.star = value,
                LSTAR => msrs.lstar = value,
                CSTAR => msrs.cstar = value,
                SFMASK => msrs.sfmask = value,
                KERNEL_GS_BASE => msrs.kernel_gs_base = value,
                TSC_AUX => msrs.tsc_aux = value,
                _ => {
                    msrs.keep(index, value);
                }
            }
        }
        msrs
    }
}

impl Cpu {
    /// Whether the local APIC is enabled (IA32_APIC_BASE); an environment without that
    /// register has one that always is.
    pub fn has_apic(&mut self) -> bool {
        let base = self.outer_msr_read(APIC_BASE);
        base.is_none_or(|base| base & APIC_ENABLED != 0)
    }

    /// RDMSR.
    pub fn read_msr(&mut self, index: u32) -> Result<u64, Faulted> {
        let value = match index {
            TSC => Some(self.tsc()),
            EFER => Some(self.efer),
            STAR => Some(self.msrs.star),
            LSTAR => Some(self.msrs.lstar),
            CSTAR => Some(self.msrs.cstar),
            SFMASK => Some(self.msrs.sfmask),
            FS_BASE => Some(self.segment_bases[segment::FS]),
            GS_BASE => Some(self.segment_bases[segment::GS]),
            KERNEL_GS_BASE => Some(self.msrs.kernel_gs_base),
            TSC_AUX => Some(self.msrs.tsc_aux),
            MTRR_CAPABILITIES => Some(MTRR_CAPABILITIES_VALUE),
            PATCH_LEVEL | MCG_CAPABILITIES => Some(0),
            _ => match self.msrs.kept(index) {
                Some(value) => Some(value),
                None => self.outer_msr_read(index),
            },
        };
        value.ok_or_else(|| self.general_protection(0))
    }

    /// WRMSR.
    pub fn write_msr(&mut self, index: u32, value: u64) -> Result<(), Faulted> {
        let address = matches!(
            index,
            LSTAR | CSTAR | FS_BASE | GS_BASE | KERNEL_GS_BASE | SYSENTER_ESP | SYSENTER_EIP
        );
        if address && !is_canonical(value) {
            return Err(self.general_protection(0));
        }
        match index {
            // The machine's: all CPUs share one.
            TSC => {}
            EFER => return self.set_efer(value),
            STAR => self.msrs.star = value,
            LSTAR => self.msrs.lstar = value,
            CSTAR => self.msrs.cstar = value,
            SFMASK => self.msrs.sfmask = value & 0xffff_ffff,
            FS_BASE => self.set_segment_base(segment::FS, value),
            GS_BASE => self.set_segment_base(segment::GS, value),
            KERNEL_GS_BASE => self.msrs.kernel_gs_base = value,
            TSC_AUX => self.msrs.tsc_aux = value,
            BIOS_SIGN_ID => {}
            _ if self.msrs.keep(index, value) => {}
            _ => {
                if !self.outer_msr_write(index, value) {
                    return Err(self.general_protection(0));
                }
            }
        }
        Ok(())
    }
}
