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

/// The first bytes of a deterministic guest's seed.
const DETERMINISTIC_SEED: [u8; 4] = *b"WEFT";

/// A guest ready to start.
pub(super) struct Guest {
    /// The first vCPU's state at its first instruction.
    pub bootstrap: CpuState,
    /// Lines for the log: the recognised kernel, and the added parameters.
    pub notes: Vec<String>,
    /// Guest-physical addresses to subscribe to, from the kernel's notes and the
    /// configuration.
    pub updated: Vec<Range<u64>>,
}

/// The open kernel and initrd of a machine. They are opened before privileges are given up,
/// and read later.
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

    /// Loads kernel, initrd and tables into `ram`. `parameters` are appended to Linux's command
    /// line.
    pub fn load(
        &self,
        configuration: &Configuration,
        ram: &Ram,
        parameters: &[&str],
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
        let parameters: Vec<&str> = parameters
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
                linux_parameters: &parameters,
                protocol: configuration.boot_protocol,
                acpi: Some(&placed),
                seed: Some(&seed),
                limit: first_end(&placement),
            },
        )?;
        let mut notes = vec![loaded.recognised.to_string()];
        if loaded.recognised.is_linux && !parameters.is_empty() {
            let parameters = parameters.join(" ");
            notes.push(format!("added to the kernel's command line: {parameters}"));
        }
        let updated = match configuration.slices.is_empty() {
            true => Vec::new(),
            false => [configuration.updated.clone(), loaded.recognised.updated].concat(),
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

/// The end of the primary's part of RAM, if there are several slices. Everything is loaded
/// below it, so that the early boot needs no other slice.
fn first_end(placement: &Placement) -> Option<u64> {
    let several = placement.slices() > 1;
    let first = several.then(|| placement.memory_of(0))?;
    first.last().map(|range| range.end)
}

/// The seed of a kernel's random number generator.
fn seed(deterministic: bool) -> std::io::Result<[u8; 32]> {
    let mut seed = [0; 32];
    if deterministic {
        seed[..4].copy_from_slice(&DETERMINISTIC_SEED);
    } else {
        File::open("/dev/urandom")?.read_exact(&mut seed)?;
    }
    Ok(seed)
}
