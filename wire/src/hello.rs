//! What two nodes tell each other about themselves, and whether a program can
//! move between them.

use crate::PROTOCOL_VERSION;
use crate::channel::{Channel, ChannelError};
use crate::cpu;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Longest text in a [`Hello`], bytes.
const TEXT_MAX: usize = 128;
/// Most CPU features in a [`Hello`].
const FEATURES_MAX: usize = 512;

/// One node's description of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`].
    pub protocol_version: u32,
    pub weft_version: String,
    /// Bytes of a page.
    pub page_bytes: u32,
    /// Names of the CPU's features that a program can find out and use.
    pub cpu_features: Vec<String>,
    /// The CPU's name, for messages only.
    pub cpu_name: String,
    /// Bytes of extended state in a signal frame.
    pub xstate_bytes: u32,
    /// Components of extended state that the kernel has switched on (XCR0).
    pub xcr0: u64,
    /// The kernel's release, for messages only.
    pub kernel_release: String,
}

/// Why a program cannot move between two nodes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// The protocols differ.
    #[error(
        "it speaks version {theirs} of the protocol, home speaks {home}: install the same Weft on both"
    )]
    Protocol {
        home: u32,
        /// The other's.
        theirs: u32,
    },
    /// The versions of Weft differ.
    #[error("it runs Weft {theirs}, home runs {home}: install the same Weft on both")]
    Weft {
        home: String,
        /// The other's.
        theirs: String,
    },
    /// The page sizes differ.
    #[error("its pages have {theirs} bytes, home's have {home}")]
    PageSize {
        home: u32,
        /// The other's.
        theirs: u32,
    },
    /// Home's CPU can do what the other's cannot.
    #[error("its CPU ({cpu}) lacks what home's has and a program may use: {}", missing.join(", "))]
    CpuFeatures {
        /// The other CPU's name.
        cpu: String,
        /// Each feature that is missing.
        missing: Vec<String>,
    },
    /// The other's CPU cannot do what a guest needs.
    #[error(
        "its CPU ({cpu}) lacks what the guest's vCPUs use: {}: choose an older --cpu",
        missing.join(", ")
    )]
    GuestFeatures {
        /// The other CPU's name.
        cpu: String,
        /// Each feature that is missing.
        missing: Vec<String>,
    },
    /// The extended registers differ.
    #[error("its kernel saves other extended registers (XCR0 {theirs:#x}) than home's ({home:#x})")]
    Xcr0 {
        home: u64,
        /// The other's.
        theirs: u64,
    },
    /// The signal frames differ.
    #[error("its signal frames hold {theirs} bytes of extended state, home's {home}")]
    Xstate {
        home: u32,
        /// The other's.
        theirs: u32,
    },
    /// The description itself is impossible.
    #[error("its description of itself is invalid: {0}")]
    Impossible(&'static str),
}

impl Hello {
    /// This node.
    pub fn here() -> Hello {
        let kernel = rustix::system::uname();
        let mut kernel_release = kernel.release().to_string_lossy().into_owned();
        kernel_release.truncate(TEXT_MAX / 4);
        Hello {
            protocol_version: PROTOCOL_VERSION,
            weft_version: env!("CARGO_PKG_VERSION").to_owned(),
            page_bytes: rustix::param::page_size() as u32,
            cpu_features: cpu::features(),
            cpu_name: cpu::name(),
            xstate_bytes: cpu::signal_frame_xstate_bytes(),
            xcr0: cpu::xcr0(),
            kernel_release,
        }
    }

    /// Whether the sizes are within what a node sends.
    fn is_bounded(&self) -> bool {
        let texts = [&self.weft_version, &self.cpu_name, &self.kernel_release];
        texts.iter().all(|text| text.len() <= TEXT_MAX)
            && self.cpu_features.len() <= FEATURES_MAX
            && self.cpu_features.iter().all(|name| name.len() <= TEXT_MAX)
    }
}

/// Sends `ours` and receives the other's.
///
/// # Errors
/// The channel's.
pub fn exchange(
    channel: &mut Channel,
    ours: &Hello,
    timeout: Duration,
) -> Result<Hello, ChannelError> {
    channel.send(ours)?;
    channel.receive(timeout)
}

/// Whether a program that started at `home` can go on at `theirs`. More CPU
/// features than home has do no harm, because the program asks at home.
///
/// # Errors
/// The first reason why it cannot, the most telling first.
pub fn check(home: &Hello, theirs: &Hello) -> Result<(), Mismatch> {
    check_build(home, theirs)?;
    check_cpu(home, theirs)
}

/// Whether two nodes can talk and share pages, whatever their CPUs are.
///
/// # Errors
/// The first reason why they cannot, the most telling first.
pub fn check_build(home: &Hello, theirs: &Hello) -> Result<(), Mismatch> {
    if home.protocol_version != theirs.protocol_version {
        return Err(Mismatch::Protocol {
            home: home.protocol_version,
            theirs: theirs.protocol_version,
        });
    }
    if !theirs.is_bounded() {
        return Err(Mismatch::Impossible("texts or lists are too long"));
    }
    if home.weft_version != theirs.weft_version {
        return Err(Mismatch::Weft {
            home: home.weft_version.clone(),
            theirs: theirs.weft_version.clone(),
        });
    }
    if home.page_bytes != theirs.page_bytes {
        return Err(Mismatch::PageSize {
            home: home.page_bytes,
            theirs: theirs.page_bytes,
        });
    }
    Ok(())
}

/// The same, and whether the other's CPU has the features that a guest is shown,
/// or that its software vCPU uses: `features`, by their names in `/proc/cpuinfo`.
///
/// # Errors
/// The first reason why they cannot, the most telling first.
pub fn check_guest(home: &Hello, theirs: &Hello, features: &[&str]) -> Result<(), Mismatch> {
    check_build(home, theirs)?;
    let has = |feature: &str| theirs.cpu_features.iter().any(|name| name == feature);
    let missing: Vec<String> = features
        .iter()
        .filter(|feature| !has(feature))
        .map(|feature| (*feature).to_owned())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let cpu = theirs.cpu_name.clone();
    Err(Mismatch::GuestFeatures { cpu, missing })
}

fn check_cpu(home: &Hello, theirs: &Hello) -> Result<(), Mismatch> {
    let missing: Vec<String> = home
        .cpu_features
        .iter()
        .filter(|feature| !theirs.cpu_features.contains(feature))
        .cloned()
        .collect();
    if !missing.is_empty() {
        let cpu = theirs.cpu_name.clone();
        return Err(Mismatch::CpuFeatures { cpu, missing });
    }
    if home.xcr0 != theirs.xcr0 {
        return Err(Mismatch::Xcr0 {
            home: home.xcr0,
            theirs: theirs.xcr0,
        });
    }
    if home.xstate_bytes != theirs.xstate_bytes {
        return Err(Mismatch::Xstate {
            home: home.xstate_bytes,
            theirs: theirs.xstate_bytes,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_fits_itself_and_survives_json() {
        let here = Hello::here();
        let text = serde_json::to_string(&here).unwrap();
        let back: Hello = serde_json::from_str(&text).unwrap();
        assert_eq!(back, here);
        assert_eq!(check(&here, &back), Ok(()));
        assert!(here.xstate_bytes >= 512 && here.cpu_features.iter().any(|f| f == "sse2"));
    }

    #[test]
    fn each_missing_feature_is_named() {
        let home = Hello::here();
        let mut theirs = home.clone();
        theirs.cpu_features.retain(|f| f != "sse2" && f != "fxsr");
        theirs.cpu_features.push("unobtainium".into());
        let error = check(&home, &theirs).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("sse2") && text.contains("fxsr"), "{text}");
        assert!(!text.contains("unobtainium"), "{text}");
    }

    #[test]
    fn a_guest_needs_what_it_is_shown_and_no_more() {
        let home = Hello::here();
        let mut theirs = home.clone();
        theirs.cpu_features = vec!["cx16".into(), "sse2".into()];
        theirs.xcr0 ^= 1 << 9;
        assert_eq!(check_guest(&home, &theirs, &["cx16"]), Ok(()));
        let error = check_guest(&home, &theirs, &["cx16", "lahf_lm"]);
        let text = error.unwrap_err().to_string();
        assert!(
            text.contains("use: lahf_lm: choose an older --cpu"),
            "{text}"
        );
        theirs.weft_version = "9.9".into();
        let error = check_guest(&home, &theirs, &[]);
        assert!(matches!(error, Err(Mismatch::Weft { .. })));
    }

    #[test]
    fn the_most_telling_difference_comes_first() {
        let home = Hello::here();
        let mut theirs = home.clone();
        theirs.xstate_bytes += 64;
        assert!(matches!(
            check(&home, &theirs),
            Err(Mismatch::Xstate { .. })
        ));
        theirs.xcr0 ^= 1 << 9;
        assert!(matches!(check(&home, &theirs), Err(Mismatch::Xcr0 { .. })));
        theirs.cpu_features.clear();
        assert!(matches!(
            check(&home, &theirs),
            Err(Mismatch::CpuFeatures { .. })
        ));
        theirs.page_bytes = 65536;
        assert!(matches!(
            check(&home, &theirs),
            Err(Mismatch::PageSize { .. })
        ));
        theirs.weft_version = "9.9".into();
        assert!(matches!(check(&home, &theirs), Err(Mismatch::Weft { .. })));
        theirs.kernel_release = "x".repeat(1000);
        assert!(matches!(
            check(&home, &theirs),
            Err(Mismatch::Impossible(_))
        ));
        theirs.protocol_version += 1;
        assert!(matches!(
            check(&home, &theirs),
            Err(Mismatch::Protocol { .. })
        ));
    }
}
