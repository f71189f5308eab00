//! Boots a kernel with the serial port on standard output; says how it ended and
//! what it counted on standard error.
//!
//! ```text
//! boot KERNEL [INITRD|-] [CPUS] [MIB] [kvm|soft|auto] [COMMAND LINE]
//! ```
//!
//! `LIMIT_SECONDS` (120) ends it and shows the registers; with `DETERMINISTIC`
//! instructions are the clock; `DISK` is a raw image.

use std::time::{Duration, Instant};

use weft_vmm::machine::{
    Answer, BackEndChoice, Configuration, Disk, Handle, Machine, Outside, Request,
};

fn main() {
    let start = Instant::now();
    let outside = Outside {
        serial: Box::new(std::io::stdout()),
        console: None,
    };
    let machine = match Machine::new(&configuration(), outside) {
        Ok(machine) => machine,
        Err(error) => {
            let source = std::error::Error::source(&error);
            eprintln!(
                "{error}: {}",
                source.map_or(String::new(), ToString::to_string)
            );
            std::process::exit(1);
        }
    };
    for note in machine.notes() {
        eprintln!("{note}");
    }
    eprintln!("built in {:?}", start.elapsed());
    let handle = machine.handle();
    handle.request(Request::Run).expect("it runs");
    let limit = variable("LIMIT_SECONDS").map_or(120, |text| text.parse().expect("seconds"));
    let end = handle.wait(Duration::from_secs(limit));
    if end.is_none() {
        show_registers(&handle);
    }
    eprintln!("{:?} after {:?}", end, start.elapsed());
    show(&handle);
    let stop = Instant::now();
    machine.finish();
    eprintln!("taken down in {:?}", stop.elapsed());
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn configuration() -> Configuration {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |index: usize| arguments.get(index).map(String::as_str);
    let kernel = argument(0).expect("a kernel");
    let mib: u64 = argument(3).map_or(256, |text| text.parse().expect("MiB"));
    let mut configuration = Configuration::new(kernel.into(), mib << 20);
    configuration.initrd = argument(1).filter(|path| *path != "-").map(Into::into);
    configuration.cpus = argument(2).map_or(1, |text| text.parse().expect("a number of CPUs"));
    configuration.back_end = match argument(4) {
        Some("kvm") => BackEndChoice::Kvm,
        Some("soft") => BackEndChoice::Soft,
        _ => BackEndChoice::Auto,
    };
    configuration.command_line = argument(5).unwrap_or("console=ttyS0").into();
    configuration.deterministic = variable("DETERMINISTIC").is_some();
    configuration.disks = variable("DISK")
        .map(|path| Disk {
            path: path.into(),
            read_only: false,
            direct: false,
        })
        .into_iter()
        .collect();
    configuration
}

fn show_registers(handle: &Handle) {
    let paused = handle.request(Request::Pause).is_ok();
    if let (true, Ok(Answer::Saved(state))) = (paused, handle.request(Request::Save)) {
        for vcpu in &state.vcpus {
            eprintln!("{:x?}", vcpu.cpu);
        }
    }
}

fn show(handle: &Handle) {
    if let Ok(Answer::Status(status)) = handle.request(Request::Status) {
        eprintln!("{status:?}");
    }
    if let Ok(Answer::Counters(counters)) = handle.request(Request::Counters) {
        for (name, count) in counters.iter().filter(|(_, count)| **count != 0) {
            eprintln!("{name} {count}");
        }
    }
}
