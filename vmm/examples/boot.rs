//! Boots a kernel with the serial port on standard output and says how it ended.
//!
//! ```text
//! boot KERNEL [INITRD|-] [CPUS] [MIB] [kvm|soft|auto] [COMMAND LINE]
//! ```

use std::time::{Duration, Instant};

use weft_vmm::machine::{Answer, BackEndChoice, Configuration, Machine, Outside, Request};

fn main() {
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
    configuration.deterministic = std::env::var_os("DETERMINISTIC").is_some();
    configuration.command_line = argument(5).unwrap_or("console=ttyS0").into();
    let start = Instant::now();
    let outside = Outside {
        serial: Box::new(std::io::stdout()),
        console: None,
    };
    let machine = match Machine::new(&configuration, outside) {
        Ok(machine) => machine,
        Err(error) => {
            eprintln!("{error}: {:?}", std::error::Error::source(&error));
            std::process::exit(1);
        }
    };
    for note in machine.notes() {
        eprintln!("{note}");
    }
    eprintln!("built in {:?}", start.elapsed());
    let handle = machine.handle();
    handle.request(Request::Run).expect("it runs");
    let limit = Duration::from_secs(120);
    let end = handle.wait(limit);
    if let Ok(Answer::Status(status)) = handle.request(Request::Status) {
        eprintln!("{status:?}");
    }
    if let Ok(Answer::Counters(counters)) = handle.request(Request::Counters) {
        for (name, count) in counters.iter().filter(|(_, count)| **count != 0) {
            eprintln!("{name} {count}");
        }
    }
    eprintln!("{end:?} after {:?}", start.elapsed());
    let stop = Instant::now();
    eprintln!("{:?} taken down in {:?}", machine.finish(), stop.elapsed());
}
