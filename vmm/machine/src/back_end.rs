//! Selects the back end of a machine's vCPUs.

use std::sync::Arc;

use weft_aggregate::Slice;
use weft_coherent_memory::mapping::GuestMapping;
use weft_confine::ThreadKind;
use weft_guest_memory::{Ram, WriteObserver};
use weft_pager::shared::Whose;
use weft_platform::clock::Source;
use weft_vcpu::{BackEnd, CpuModel, Memory};
use weft_vcpu_kvm::detect::{Backend, Choice};
use weft_vcpu_kvm::{Host, KvmBackEnd, KvmError, KvmOptions, Paging};

use super::MachineError;
use super::configuration::{BackEndChoice, Configuration};
use crate::vcpu::notifiers::{KvmShadows, SoftMmuNotifier};
use crate::vcpu::soft::SoftBackEnd;

/// The selected back end, ready to make vCPUs.
pub(super) struct Chosen {
    pub back_end: Box<dyn BackEnd>,
    /// Selects the seccomp filter of the vCPUs' threads.
    pub kind: ThreadKind,
    /// Called after devices have written to guest memory.
    pub observer: Option<Arc<dyn WriteObserver>>,
    /// Why it was selected: a sentence for the log.
    pub reason: String,
}

impl Chosen {
    /// Lines for the log: the back end, why it was selected, and its quirks.
    pub fn notes(&self) -> Vec<String> {
        let quirks = self.back_end.quirks();
        let mut notes = vec![self.reason.clone()];
        notes.extend(quirks.iter().map(|quirk| format!("quirk: {quirk}")));
        notes
    }

    /// The source of guest time with this back end.
    pub fn source(&self, deterministic: bool) -> Source {
        match self.back_end.fixed_tsc_offset() {
            _ if deterministic => Source::Counted,
            Some(offset) => Source::HostFixed(offset),
            None => Source::Host,
        }
    }
}

/// Opens the configured back end. `slice` is `None` if the machine has one slice that stays alone.
pub(super) fn choose(
    configuration: &Configuration,
    ram: &Ram,
    slice: Option<&Slice>,
) -> Result<Chosen, MachineError> {
    let wanted = match configuration.back_end {
        BackEndChoice::Soft => Some(Backend::Soft),
        BackEndChoice::Kvm => Some(Backend::Kvm),
        BackEndChoice::Auto if configuration.deterministic => Some(Backend::Soft),
        BackEndChoice::Auto => None,
    };
    let mut choice = Backend::choose(wanted)?;
    if slice.is_some() && wanted.is_none() && choice.host.is_some() {
        choice = Choice {
            host: None,
            reason: "software vCPU: several nodes use KVM only where it is asked for".into(),
        };
    }
    let Choice { host, reason } = choice;
    let Some(host) = host else {
        let package_cpus = configuration.placement().package_cpus();
        let memory: Arc<dyn Memory> = match slice {
            Some(slice) => slice.memory().clone(),
            None => Arc::new(ram.clone()),
        };
        let model = configuration.cpu_model.unwrap_or_default();
        check_host(model)?;
        let mut soft = SoftBackEnd::new(memory, model, package_cpus, configuration.deterministic);
        if let Some(slice) = slice {
            soft = soft.with_tsc_hz(slice.reference().tsc_hz);
            slice
                .memory()
                .register_notifier(Box::new(SoftMmuNotifier(Arc::downgrade(soft.machine()))));
        }
        return Ok(Chosen {
            kind: ThreadKind::SoftVcpu,
            observer: Some(soft.observer()),
            back_end: Box::new(soft),
            reason,
        });
    };
    let back_end = match slice {
        None => kvm_of_machine(&host, configuration, ram)?,
        Some(slice) => kvm_of_slice(&host, configuration, ram, slice)?,
    };
    Ok(Chosen {
        back_end: Box::new(back_end),
        kind: ThreadKind::KvmVcpu,
        observer: None,
        reason,
    })
}

/// Refuses a CPU model with instructions that this host's CPU lacks.
pub fn check_host(model: CpuModel) -> Result<(), MachineError> {
    let missing = model.missing(&weft_wire::cpu::features());
    if missing.is_empty() {
        return Ok(());
    }
    let missing = missing.join(", ");
    Err(MachineError::CpuModel { model, missing })
}

/// The CPU features that a host must have to continue a guest of this back end, by their
/// names in `/proc/cpuinfo`: of the software vCPU those of its model, of KVM all that this
/// host has, since it may have shown them to the guest.
pub fn features_shown(back_end: &str, model: Option<CpuModel>) -> Vec<String> {
    match back_end {
        "kvm" => weft_wire::cpu::features(),
        _ => {
            let features = model.unwrap_or_default().host_features();
            features.iter().map(|name| (*name).to_owned()).collect()
        }
    }
}

/// Those of `features` that this host's CPU lacks.
pub fn features_missing(features: &[String]) -> Vec<String> {
    let here = weft_wire::cpu::features();
    let missing = features.iter().filter(|name| !here.contains(name));
    missing.cloned().collect()
}

fn kvm_of_machine(
    host: &Host,
    configuration: &Configuration,
    ram: &Ram,
) -> Result<KvmBackEnd, MachineError> {
    let options = KvmOptions {
        ram,
        cpus: configuration.cpus,
        package_cpus: configuration.cpus,
        model: configuration.cpu_model,
        shared: false,
    };
    KvmBackEnd::of(host, &options).map_err(kvm_refused)
}

/// Opens KVM for a slice: its vCPUs use a watched mapping of guest RAM.
fn kvm_of_slice(
    host: &Host,
    configuration: &Configuration,
    ram: &Ram,
    slice: &Slice,
) -> Result<KvmBackEnd, MachineError> {
    if host.is_hardware() && host.paging == Paging::Shadow {
        let reason = "this KVM was told to shadow page tables: load kvm_intel with ept=1, or \
                      kvm_amd with npt=1";
        return Err(MachineError::SlicesOnKvm(reason.into()));
    }
    let mapping = GuestMapping::new(ram, Whose::All)
        .map_err(|error| MachineError::SlicesOnKvm(error.to_string()))?;
    let options = KvmOptions {
        ram: mapping.watched(),
        cpus: configuration.cpus,
        package_cpus: configuration.placement().package_cpus(),
        model: configuration.cpu_model,
        shared: true,
    };
    let back_end = KvmBackEnd::of(host, &options).map_err(kvm_refused)?;
    let mapping = match back_end.gate() {
        Some(gate) => mapping.with_shadows(Arc::new(KvmShadows(gate.clone()))),
        None => mapping,
    };
    slice.watch(Arc::new(mapping));
    Ok(back_end)
}

fn kvm_refused(source: KvmError) -> MachineError {
    MachineError::Kvm(source)
}
