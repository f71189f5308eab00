//! Which back end runs a machine's vCPUs, and why.

use std::sync::Arc;

use weft_soft::Memory;

use super::MachineError;
use super::configuration::{BackEndChoice, Configuration};
use crate::clock::Source;
use crate::confine::ThreadKind;
use crate::memory::Ram;
use crate::slice::Slice;
use crate::vcpu::BackEnd;
use crate::vcpu::kvm::detect::{Backend, Choice};
use crate::vcpu::kvm::{KvmBackEnd, KvmError};
use crate::vcpu::soft::SoftBackEnd;
use crate::virtio::WriteObserver;

/// A back end, ready to make vCPUs.
pub(super) struct Chosen {
    pub back_end: Box<dyn BackEnd>,
    /// How the vCPUs' threads are confined.
    pub kind: ThreadKind,
    /// Hears of guest memory that devices wrote.
    pub observer: Option<Arc<dyn WriteObserver>>,
    /// One sentence for the log.
    pub reason: String,
}

impl Chosen {
    /// For the log: which one it is and why, and what it does on its own.
    pub fn notes(&self) -> Vec<String> {
        let quirks = self.back_end.quirks();
        let mut notes = vec![self.reason.clone()];
        notes.extend(quirks.iter().map(|quirk| format!("quirk: {quirk}")));
        notes
    }

    /// Where guest time comes from with this back end.
    pub fn source(&self, deterministic: bool) -> Source {
        match self.back_end.fixed_tsc_offset() {
            _ if deterministic => Source::Counted,
            Some(offset) => Source::HostFixed(offset),
            None => Source::Host,
        }
    }
}

/// Opens the back end that the configuration asks for.
/// `slice`: of several.
pub(super) fn choose(
    configuration: &Configuration,
    ram: &Ram,
    slice: Option<&Slice>,
) -> Result<Chosen, MachineError> {
    let wanted = match configuration.back_end {
        BackEndChoice::Soft => Some(Backend::Soft),
        BackEndChoice::Kvm => Some(Backend::Kvm),
        BackEndChoice::Auto if configuration.deterministic || slice.is_some() => {
            Some(Backend::Soft)
        }
        BackEndChoice::Auto => None,
    };
    let Choice { host, reason } = Backend::choose(wanted)?;
    let Some(host) = host else {
        let package_cpus = configuration.placement().package_cpus();
        let memory: Arc<dyn Memory> = match slice {
            Some(slice) => slice.memory().clone(),
            None => Arc::new(ram.clone()),
        };
        let mut soft = SoftBackEnd::new(memory, package_cpus, configuration.deterministic);
        if let Some(slice) = slice {
            soft = soft.with_tsc_hz(slice.reference().tsc_hz);
            slice
                .memory()
                .connect(Box::new(Arc::downgrade(soft.machine())));
        }
        return Ok(Chosen {
            kind: ThreadKind::SoftVcpu,
            observer: Some(soft.observer()),
            back_end: Box::new(soft),
            reason,
        });
    };
    if slice.is_some() {
        return Err(MachineError::SlicesOnKvm);
    }
    let back_end = KvmBackEnd::new(&host, ram, configuration.cpus).map_err(kvm_refused)?;
    Ok(Chosen {
        back_end: Box::new(back_end),
        kind: ThreadKind::KvmVcpu,
        observer: None,
        reason,
    })
}

fn kvm_refused(source: KvmError) -> MachineError {
    MachineError::Kvm(source)
}
