//! The software vCPU as a back end of machines.

use std::sync::{Arc, OnceLock};

use weft_guest_memory::WriteObserver;
use weft_platform::clock::{COUNTED_HZ, begin_tsc_measurement, measure_host_tsc};
use weft_vcpu::{CpuModel, Memory};
use weft_vcpu_soft::{SoftCpu, SoftMachine};

use weft_vcpu::{BackEnd, Vcpu, VcpuError};

/// The environment variable that disables the translator: everything is interpreted, for
/// measurements and to find faults of the translator.
const INTERPRET: &str = "WEFT_SOFT_INTERPRET";

/// Makes the software vCPUs of one machine.
pub struct SoftBackEnd {
    machine: Arc<SoftMachine>,
    model: CpuModel,
    package_cpus: u32,
    /// Set at the first use, because measuring takes time.
    tsc_hz: OnceLock<u64>,
    deterministic: bool,
}

impl SoftBackEnd {
    /// A back end for a machine with this memory, and this many vCPUs of a model in each
    /// package. `deterministic`: instructions are the clock. The host must have the features
    /// that the model needs ([`CpuModel::host_features`]).
    pub fn new(
        memory: Arc<dyn Memory>,
        model: CpuModel,
        package_cpus: u32,
        deterministic: bool,
    ) -> Self {
        if !deterministic {
            begin_tsc_measurement();
        }
        Self {
            machine: SoftMachine::new(memory),
            model,
            package_cpus,
            tsc_hz: OnceLock::new(),
            deterministic,
        }
    }

    /// Sets the rate of the TSC, which another slice has measured. Before vCPUs are made.
    pub fn with_tsc_hz(self, tsc_hz: u64) -> Self {
        // Deterministic time has a rate of its own.
        if !self.deterministic {
            // A second rate is a mistake that the first survives.
            let _ = self.tsc_hz.set(tsc_hz);
        }
        self
    }

    /// The state that its vCPUs share.
    pub fn machine(&self) -> &Arc<SoftMachine> {
        &self.machine
    }

    /// What must be called after devices have written to guest memory.
    pub fn observer(&self) -> Arc<dyn WriteObserver> {
        Arc::new(Written(self.machine.clone()))
    }
}

impl BackEnd for SoftBackEnd {
    fn name(&self) -> &'static str {
        "soft"
    }

    fn tsc_hz(&self) -> u64 {
        *self.tsc_hz.get_or_init(|| match self.deterministic {
            true => COUNTED_HZ,
            false => measure_host_tsc(),
        })
    }

    fn create(&self, id: u32) -> Result<Box<dyn Vcpu>, VcpuError> {
        let configuration = weft_vcpu_soft::Configuration {
            model: self.model,
            apic_id: id,
            cpus: self.package_cpus,
            tsc_frequency: self.tsc_hz(),
            deterministic: self.deterministic,
        };
        let mut cpu =
            SoftCpu::new(&self.machine, configuration).map_err(|source| VcpuError::Kernel {
                what: "memory for a software vCPU's code",
                source,
            })?;
        if std::env::var_os(INTERPRET).is_some() {
            cpu.interpret_only();
        }
        Ok(Box::new(cpu))
    }
}

struct Written(Arc<SoftMachine>);

impl WriteObserver for Written {
    fn written(&self, address: u64, length: u64) {
        self.0.written(address..address.saturating_add(length));
    }
}
