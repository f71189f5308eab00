//! What is in guest memory before the first instruction: tables and a kernel.

use std::fs::File;
use std::io::Read;
use std::ops::Range;

use weft_boot::{ImageFile, Role};
use weft_guest_memory::Ram;
use weft_platform::acpi;
use weft_platform::acpi::Description;
use weft_vcpu::CpuState;

use super::MachineError;
use super::configuration::Configuration;
use super::kernel_parameters;
use weft_aggregate::Placement;

/// Begins the randomness that a deterministic guest is given.
const DETERMINISTIC_SEED: [u8; 4] = *b"WEFT";

/// A guest ready to start.
pub(super) struct Guest {
    /// The first CPU at its first instruction.
    pub bootstrap: CpuState,
    /// What was recognised, and what was added.
    pub notes: Vec<String>,
    /// Guest-physical addresses to keep up to date, from the kernel's own notes and
    /// the configuration.
    pub updated: Vec<Range<u64>>,
}

/// The files that a machine starts from, open. They are read later, but not asked
/// for again.
pub(super) struct Files {
    kernel: ImageFile,
    initrd: Option<ImageFile>,
}

impl Files {
    pub fn open(configuration: &Configuration) -> Result<Self, MachineError> {
        let initrd = configuration.initrd.as_deref();
        Ok(Self {
            kernel: ImageFile::open(Role::Kernel, &configuration.kernel)?,
            initrd: initrd
                .map(|path| ImageFile::open(Role::Initrd, path))
                .transpose()?,
        })
    }

    /// Puts all that the guest starts with into `ram`. `words` go to the end of
    /// Linux's command line.
    pub fn load(
        &self,
        configuration: &Configuration,
        ram: &Ram,
        words: &[&str],
    ) -> Result<Guest, MachineError> {
        let placement = configuration.placement();
        let placed = acpi::place(
            ram,
            &Description {
                nodes: placement.nodes(),
                high_window: acpi::high_window(ram),
                real_time_clock: true,
            },
        )?;
        let several =
            kernel_parameters::kernel_parameters(configuration, &placement, self.initrd.as_ref());
        let words: Vec<&str> = words
            .iter()
            .copied()
            .chain(several.iter().map(String::as_str))
            .collect();
        let seed = seed(configuration.deterministic).map_err(MachineError::Seed)?;
        let loaded = weft_boot::load(
            ram,
            &weft_boot::Request {
                kernel: &self.kernel,
                initrd: self.initrd.as_ref(),
                command_line: configuration.command_line.trim(),
                linux_words: &words,
                protocol: configuration.boot_protocol,
                acpi: Some(&placed),
                seed: Some(&seed),
                limit: first_end(&placement),
            },
        )?;
        let mut notes = vec![loaded.recognised.to_string()];
        if loaded.recognised.is_linux && !words.is_empty() {
            let words = words.join(" ");
            notes.push(format!("added to the kernel's command line: {words}"));
        }
        let updated = match placement.slices() {
            0 | 1 => Vec::new(),
            _ => [configuration.updated.clone(), loaded.recognised.updated].concat(),
        };
        for range in &updated {
            let (start, end) = (range.start, range.end);
            notes.push(format!("kept up to date on all nodes: {start:#x}-{end:#x}"));
        }
        Ok(Guest {
            bootstrap: loaded.state,
            notes,
            updated,
        })
    }
}

/// Where the memory of the primary ends, of several: what is loaded lies
/// there, so that a boot needs nothing of the others.
fn first_end(placement: &Placement) -> Option<u64> {
    let several = placement.slices() > 1;
    let first = several.then(|| placement.memory_of(0))?;
    first.last().map(|range| range.end)
}

/// The randomness that a kernel is given to start with.
fn seed(deterministic: bool) -> std::io::Result<[u8; 32]> {
    let mut seed = [0; 32];
    if deterministic {
        seed[..4].copy_from_slice(&DETERMINISTIC_SEED);
    } else {
        File::open("/dev/urandom")?.read_exact(&mut seed)?;
    }
    Ok(seed)
}
