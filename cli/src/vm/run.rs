//! `weft vm run`: has the launcher ([`weft_node::launch::machine`]) live one life of a
//! machine after the other.
//!
//! This process stays outside: it never touches the guest, keeps the rights it
//! was started with, has the machine made anew when the guest restarts (sockets stay,
//! so clients only wait), and in the end removes the sockets, repairs the terminal and
//! says what happened. The machine's processes give up what they can and die with this
//! one.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
use weft_aggregate::PRIMARY;
use weft_machine::End;
use weft_monitor::outcome::Outcome;
use weft_monitor::settings::{OwnSettings, SliceSettings};
use weft_node::keeper::Keeper;
use weft_node::launch::Signals;
use weft_node::launch::machine::{
    self, Inheritance, Machine, MachineOutcome, MachinePlan, MachineSettings, Share,
};
use weft_node::options::Placement;
use weft_node::rundir;
use weft_platform::clock::{Reference, TscMeasurement, begin_tsc_measurement};

use super::args::VmRunArgs;
use super::error::{EXIT_SETUP, EXIT_TRIPLE_FAULT, VmError};
use super::kept;
use super::next_life;
use super::outcome::{self, Report};
use super::placed::{self, Checked};
use super::plan::Plan;
use super::registry::Registration;
use super::suboptions::ConsoleArg;
use super::trace;
use crate::values::StatsArg;
use crate::work;

/// A life shorter than this that ends in a triple fault is a crash.
const CRASH: Duration = Duration::from_secs(1);
/// So many crashes in a row are not started again.
const CRASHES_MAX: u32 = 3;
/// Runs a machine to its end.
pub fn run(args: &mut VmRunArgs, started: Instant) -> anyhow::Result<ExitCode> {
    let tsc = begin_tsc_measurement();
    match placed::check(args) {
        Ok(Checked::Runs(plan)) => {
            if args.place.placed.is_some() {
                work::end_with_connection();
            }
            run_plan(&plan, args, None, (started, tsc))
        }
        Ok(Checked::Shown(code)) => Ok(code),
        Err(error) => Ok(set_up_failed(&error)),
    }
}

/// Runs a machine whose options were judged to its end, or to that of its keeper.
pub fn run_plan(
    plan: &Plan,
    args: &VmRunArgs,
    keeper: Option<Keeper>,
    begun: (Instant, TscMeasurement),
) -> anyhow::Result<ExitCode> {
    let prepared = move || -> anyhow::Result<(Option<File>, Option<File>, Registration)> {
        // Opened first: a summary that cannot be written is better known before
        // hours of work than after.
        let file =
            match &args.stats {
                Some(StatsArg::JsonFile(path)) => Some(File::create(path).with_context(|| {
                    format!("cannot write the statistics to {}", path.display())
                })?),
                _ => None,
            };
        let trace = args.trace.as_ref().map(|path| {
            File::create(path)
                .with_context(|| format!("cannot write the trace to {}", path.display()))
        });
        let trace = trace.transpose()?;
        let registry = Registration::claim(plan)?;
        kept::end_with(keeper, &plan.name, registry.files())?;
        Ok((file, trace, registry))
    };
    let (file, trace, registry) = match prepared() {
        Ok(prepared) => prepared,
        Err(error) => return Ok(set_up_failed(&error)),
    };
    match supervise(plan, &registry, None, begun) {
        Err(error) => {
            let code = error.exit_code();
            set_up_failed(&error.into());
            Ok(ExitCode::from(code))
        }
        Ok(Last::NotStarted(why)) => {
            eprintln!("weft: {why}");
            Ok(ExitCode::from(EXIT_SETUP))
        }
        Ok(Last::Killed(code)) => Ok(ExitCode::from(code)),
        Ok(Last::Ended(ended)) => {
            eprintln!("weft: {}", outcome::sentence(&plan.name, &ended.outcome));
            report(args, file, plan, &ended)?;
            if let (Some(file), Some(trace)) = (trace, &ended.outcome.trace) {
                let path = args.trace.as_deref().unwrap_or(Path::new("trace"));
                trace::write(trace, file, path, &plan.name)?;
            }
            Ok(ExitCode::from(ended.code()))
        }
    }
}

/// What a machine from another host comes with.
pub struct Arrival {
    /// Guest memory.
    pub memory: OwnedFd,
    /// To the daemon, from which its state comes.
    pub socket: OwnedFd,
    /// Other nodes, which stay.
    pub others: Option<Inheritance>,
}

/// Has a machine from another host go on, to its end. `failed` hears why it could not be made.
pub fn run_arrival(
    plan: &Plan,
    registry: &Registration,
    arrival: Arrival,
    begun: (Instant, TscMeasurement),
    failed: &dyn Fn(&str),
) -> anyhow::Result<ExitCode> {
    let not_made = |why: String| {
        eprintln!("weft: {why}");
        failed(&why);
        ExitCode::from(EXIT_SETUP)
    };
    Ok(match supervise(plan, registry, Some(arrival), begun) {
        Err(error) => not_made(format!("{:#}", anyhow::Error::from(error))),
        Ok(Last::NotStarted(why)) => not_made(why),
        Ok(Last::Killed(code)) => ExitCode::from(code),
        Ok(Last::Ended(ended)) => {
            eprintln!("weft: {}", outcome::sentence(&plan.name, &ended.outcome));
            ExitCode::from(ended.code())
        }
    })
}

/// Reports why a machine did not start.
pub fn set_up_failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("weft: {error:#}");
    ExitCode::from(EXIT_SETUP)
}

/// The last life of a machine.
enum Last {
    /// Why it did not start.
    NotStarted(String),
    /// It ended without a last word; its exit code.
    Killed(u8),
    Ended(Box<Ended>),
}

struct Ended {
    outcome: Outcome,
    restarts: u32,
    resident_bytes_max: u64,
    /// It was not started again although resets are.
    crashed: bool,
}

impl Ended {
    fn code(&self) -> u8 {
        match self.crashed {
            true => EXIT_TRIPLE_FAULT,
            false => outcome::exit_code(&self.outcome),
        }
    }
}

fn report(args: &VmRunArgs, file: Option<File>, plan: &Plan, ended: &Ended) -> anyhow::Result<()> {
    let outcome = &ended.outcome;
    let report = Report {
        format: 1,
        name: &plan.name,
        pid: std::process::id(),
        back_end: &outcome.back_end,
        end: outcome.end.to_string(),
        signal: outcome.signal,
        exit_code: ended.code(),
        restarts: ended.restarts,
        start_time_s: outcome.start_time_s,
        boot_time_s: outcome.boot_time_s,
        run_time_s: outcome.run_time_s,
        guest_time_s: outcome.guest_time_s,
        resident_bytes_max: ended.resident_bytes_max,
        console_bytes_lost: outcome.console_bytes_lost,
        counters: &outcome.counters,
    };
    match (&args.stats, file) {
        (Some(StatsArg::JsonFile(path)), Some(mut file)) => {
            let mut text = serde_json::to_vec_pretty(&report)?;
            text.push(b'\n');
            file.write_all(&text)
                .with_context(|| format!("cannot write the statistics to {}", path.display()))?;
        }
        (Some(StatsArg::Json), _) => eprintln!("{}", serde_json::to_string_pretty(&report)?),
        (Some(StatsArg::Text), _) => {
            for (name, value) in &ended.outcome.counters {
                eprintln!("  {name:<40} {value:>14}");
            }
        }
        _ => {}
    }
    Ok(())
}

/// One life after the other.
fn supervise(
    plan: &Plan,
    registry: &Registration,
    mut arrival: Option<Arrival>,
    (mut started, mut tsc): (Instant, TscMeasurement),
) -> Result<Last, VmError> {
    let signals = machine::take_signals()?;
    let terminal = Terminal::remember(plan);
    let (mut restarts, mut crashes) = (0, 0);
    let mut plan = Cow::Borrowed(plan);
    loop {
        let life = Life {
            plan: &plan,
            registry,
            arrival: arrival.take(),
            started,
            tsc,
            restarts,
        };
        let lived = life.live(&signals);
        terminal.restore();
        let lived = lived?;
        if let Some(why) = lived.out_of_memory {
            eprintln!("weft: vm {}: {why}", plan.name);
        }
        if let Some(why) = lived.failed {
            return Ok(Last::NotStarted(why));
        }
        let Ok(mut outcome) = serde_json::from_slice::<Outcome>(&lived.word) else {
            let (sentence, code) = outcome::killed(lived.ended, plan.nodes.describe(PRIMARY));
            eprintln!("weft: vm {}: {sentence}", plan.name);
            return Ok(Last::Killed(code));
        };
        // A node that joined was named by its number alone.
        let lost = lived.hosts.iter();
        for (node, host) in lost.filter(|(node, _)| outcome::lost(&outcome.end, *node)) {
            eprintln!("weft: vm {}: node {node} was on {host}", plan.name);
        }
        crashes = match outcome.end {
            End::TripleFault { .. } if outcome.run_time_s < CRASH.as_secs_f64() => crashes + 1,
            _ => 0,
        };
        let crashed = crashes == CRASHES_MAX;
        // A signal may have come too late for the machine's process to hear of it.
        outcome.end_asked |= lived.end_asked;
        let again = plan.reboot && !outcome.end_asked && !crashed;
        if !again || !outcome::restarts(&outcome.end) {
            return Ok(Last::Ended(Box::new(Ended {
                outcome,
                restarts,
                resident_bytes_max: lived.resident_bytes_max,
                crashed: crashed && plan.reboot,
            })));
        }
        eprintln!(
            "weft: {}; restarting",
            outcome::sentence(&plan.name, &outcome)
        );
        if plan.stays_on_hosts {
            let next = next_life::plan(&plan, &lived.hosts, &outcome.shares);
            let next = next.map_err(|why| VmError::Option(format!("its next life: {why}")))?;
            plan = Cow::Owned(next);
        }
        restarts += 1;
        started = Instant::now();
        tsc = begin_tsc_measurement();
    }
}

/// What one life of a machine is made from.
struct Life<'a> {
    /// What to run.
    plan: &'a Plan,
    /// Its sockets.
    registry: &'a Registration,
    /// Of a machine that comes from another host.
    arrival: Option<Arrival>,
    /// When the command, or this life, began.
    started: Instant,
    /// The measurement that began then.
    tsc: TscMeasurement,
    /// How often the guest restarted before.
    restarts: u32,
}

impl Life<'_> {
    fn live(mut self, signals: &Signals) -> Result<MachineOutcome, VmError> {
        let name = &self.plan.name;
        // The terminal may be in raw mode.
        let mut say = |text: &str| eprint!("weft: vm {name}: {text}\r\n");
        let others = (self.arrival.as_mut()).and_then(|arrival| arrival.others.take());
        let machine = match others {
            Some(others) => Machine::inherit(self.asked(), others, signals, &mut say)?,
            None => Machine::spawn(self.asked(), signals, &mut say)?,
        };
        let settings = self
            .settings()
            .map_err(|error| VmError::system("describe the machine")(io::Error::from(error)))?;
        let mut sockets = vec![self.registry.api.as_fd()];
        sockets.extend(
            self.registry
                .console
                .iter()
                .map(|(socket, _)| socket.as_fd()),
        );
        if let Some(Arrival { memory, socket, .. }) = &self.arrival {
            sockets.extend([memory.as_fd(), socket.as_fd()]);
        }
        Ok(machine.live(settings, &sockets)?)
    }

    fn asked(&self) -> MachinePlan {
        let Plan {
            nodes,
            configuration,
            ..
        } = self.plan;
        let placement = configuration.placement();
        let shares = nodes.shares.iter().enumerate().map(|(node, share)| Share {
            memory_bytes: placement.budget_bytes(node, configuration.spare_bytes),
            cpus: share.cpus,
            described: nodes.describe(node).unwrap_or_default(),
        });
        MachinePlan {
            name: self.plan.name.clone(),
            placement: match nodes.hosts.is_empty() {
                true => Placement::Embedded(nodes.count),
                false => Placement::Remote(nodes.hosts.clone()),
            },
            transport: nodes.transport,
            lease: nodes.lease,
            shares: shares.collect(),
            boot_files: match self.plan.reboot {
                true => configuration.boot_files(),
                false => Vec::new(),
            },
            features: configuration.cpu_model.unwrap_or_default().host_features(),
            configuration: None,
        }
    }

    fn settings(&self) -> serde_json::Result<MachineSettings> {
        let Life { plan, registry, .. } = self;
        let machine = SliceSettings {
            configuration: plan.configuration.clone(),
            reference: (!plan.nodes.shares.is_empty()).then(Reference::here),
            link_delay_max: plan.nodes.link_delay_max,
        };
        let own = OwnSettings {
            name: plan.name.clone(),
            confine: plan.confine,
            user: plan.identity.as_ref().map(Into::into),
            started: self.started.into(),
            tsc: self.tsc,
            restarts: self.restarts,
            ready: plan.ready.clone(),
            // A guest that restarts boots its kernel.
            restore: plan.restore.clone().filter(|_| self.restarts == 0),
            hosts: plan.nodes.hosts.clone(),
            console: registry.console.as_ref().map(|(_, path)| path.clone()),
            switches: rundir::switches(),
            lender: plan.lender.clone(),
            takes_home: self.arrival.is_some(),
        };
        Ok(MachineSettings {
            machine: serde_json::to_string(&machine)?,
            own: serde_json::to_string(&own)?,
        })
    }
}

/// The mode of the terminal at the start, for when a machine's process was killed
/// in raw mode. None where the console is elsewhere: then nobody changes the mode,
/// and a process in the background that sets it is stopped (SIGTTOU).
struct Terminal(Option<Termios>);

impl Terminal {
    fn remember(plan: &Plan) -> Terminal {
        let input = io::stdin();
        let here = plan.console == ConsoleArg::Stdio && input.is_terminal();
        Terminal(here.then(|| tcgetattr(input.as_fd()).ok()).flatten())
    }

    fn restore(&self) {
        if let Some(mode) = &self.0 {
            let _ = tcsetattr(io::stdin().as_fd(), SetArg::TCSANOW, mode);
        }
    }
}
