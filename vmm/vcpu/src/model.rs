//! Which CPU a guest sees, by the levels of the x86-64 psABI, which distributions
//! are built for. Each level has all of the one below.
//!
//! What a level adds runs on the host as it is, so the host must have it too.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A level of x86-64.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum CpuModel {
    /// SSE2, as the first processors; CMPXCHG16B and LAHF beside.
    V1,
    /// SSE3 to SSE4.2 and POPCNT; AES and PCLMULQDQ beside.
    #[default]
    V2,
    /// AVX, AVX2, BMI1, BMI2, F16C, FMA, LZCNT, MOVBE, XSAVE.
    V3,
}

/// Of the host, by the names in `/proc/cpuinfo`: the first two for every model
/// (flags are kept with LAHF and SAHF), then what V2 and V3 add.
const HOST_FEATURES: [&str; 19] = [
    "cx16",
    "lahf_lm",
    "sse3",
    "ssse3",
    "sse4_1",
    "sse4_2",
    "popcnt",
    "aes",
    "pclmulqdq",
    "xsave",
    "osxsave",
    "avx",
    "avx2",
    "bmi1",
    "bmi2",
    "f16c",
    "fma",
    "movbe",
    "abm",
];
/// Of [`HOST_FEATURES`], those of V2.
const HOST_FEATURES_V2: usize = 9;

impl CpuModel {
    /// All of them, the lowest first.
    pub const ALL: [Self; 3] = [Self::V1, Self::V2, Self::V3];

    /// As the command line has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
            Self::V3 => "v3",
        }
    }

    /// What the host's CPU must have, by the names in `/proc/cpuinfo`. Whatever else
    /// it has is neither shown nor used (WRGSBASE is, where the kernel allows it; a
    /// system call does the same).
    pub fn host_features(self) -> &'static [&'static str] {
        match self {
            Self::V1 => &HOST_FEATURES[..2],
            Self::V2 => &HOST_FEATURES[..HOST_FEATURES_V2],
            Self::V3 => &HOST_FEATURES,
        }
    }

    /// What of that a host lacks.
    pub fn missing(self, host: &[String]) -> Vec<&'static str> {
        let lacks = |feature: &&str| !host.iter().any(|name| name == feature);
        self.host_features().iter().copied().filter(lacks).collect()
    }

    /// Its bits of CPUID beside those that every model has.
    pub const fn bits(self) -> CpuidBits {
        // SSE3, PCLMULQDQ, SSSE3, SSE4.1, SSE4.2, POPCNT, AES.
        const V2: u32 = 1 | 1 << 1 | 1 << 9 | 1 << 19 | 1 << 20 | 1 << 23 | 1 << 25;
        let none = CpuidBits {
            leaf_1_ecx: 0,
            leaf_7_ebx: 0,
            extended_ecx: 0,
        };
        match self {
            Self::V1 => none,
            Self::V2 => CpuidBits {
                leaf_1_ecx: V2,
                ..none
            },
            Self::V3 => CpuidBits {
                // FMA, MOVBE, XSAVE, AVX, F16C.
                leaf_1_ecx: V2 | 1 << 12 | 1 << 22 | 1 << 26 | 1 << 28 | 1 << 29,
                // BMI1, AVX2, BMI2.
                leaf_7_ebx: 1 << 3 | 1 << 5 | 1 << 8,
                // LZCNT.
                extended_ecx: 1 << 5,
            },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuidBits {
    pub leaf_1_ecx: u32,
    pub leaf_7_ebx: u32,
    /// Leaf 8000_0001, ECX.
    pub extended_ecx: u32,
}

impl fmt::Display for CpuModel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_lacks_what_later_models_add() {
        let old = ["cx16", "lahf_lm", "sse3", "ssse3"].map(str::to_owned);
        assert!(CpuModel::V1.missing(&old).is_empty());
        let missing = CpuModel::V2.missing(&old);
        assert_eq!(missing, ["sse4_1", "sse4_2", "popcnt", "aes", "pclmulqdq"]);
        let second = CpuModel::V2.host_features().iter();
        let second: Vec<String> = second.map(|name| (*name).to_owned()).collect();
        assert!(CpuModel::V2.missing(&second).is_empty());
        assert!(CpuModel::V3.missing(&second).contains(&"avx2"));
        assert_eq!(CpuModel::V1.missing(&[]), ["cx16", "lahf_lm"]);
    }
}
