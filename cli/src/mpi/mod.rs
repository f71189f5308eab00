//! `weft mpi`: malleable clusters.

mod args;
mod program;
mod status;
mod top;

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use weft_mpi::launcher::{self, Changes, HOSTS_MAX, Launcher, ListedHost, Options, SiteOptions};
use weft_mpi::request::{self, Answer, Request};
use weft_vcpu::CpuModel;

use args::{MpiResumeArgs, MpiRunArgs, OnArg};

pub use args::MpiCommand;

/// Does what the command says.
pub fn run(command: MpiCommand) -> anyhow::Result<ExitCode> {
    match command {
        MpiCommand::Run(args) => match create(*args) {
            Ok(launcher) => serve(launcher),
            Err(error) => {
                eprintln!("weft: {error:#}");
                Ok(ExitCode::from(125))
            }
        },
        MpiCommand::Attach { name } => serve(launcher::attach(&name)?),
        MpiCommand::Resume(args) => serve(resume(args)?),
        MpiCommand::List { json } => status::list(json),
        MpiCommand::Status { cluster, json } => status::show(&one(cluster.either())?, json),
        MpiCommand::Top { cluster } => top::run(cluster.either()),
        MpiCommand::Hosts { count, cluster } => ask(cluster.cluster, &Request::Hosts(count)),
        MpiCommand::Newnode { cluster } => ask(cluster.cluster, &Request::NewNode),
        MpiCommand::Shrink { count, cluster } => ask(cluster.cluster, &Request::Shrink(count)),
        MpiCommand::Release { host, cluster } => ask(cluster.cluster, &Request::Release(host)),
        MpiCommand::Deploy { file, cluster } => {
            let file = whole(&file)?;
            ask(cluster.cluster, &Request::Deploy(file))
        }
        MpiCommand::Extend {
            host,
            minutes,
            cluster,
        } => ask(cluster.cluster, &Request::Extend(host, minutes)),
        MpiCommand::Exit { cluster } => ask(cluster.either(), &Request::Exit),
        MpiCommand::Ssh {
            name,
            machine,
            command,
        } => {
            let error = launcher::shell(&name, machine, &command.join(" "))?.exec();
            Err(error).context("cannot start dbclient of the image")
        }
        MpiCommand::Forget { saved, name } => {
            launcher::forget(&name, saved)?;
            Ok(ExitCode::SUCCESS)
        }
        MpiCommand::Host { token } => {
            weft_mpi::agent::run(&token)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn serve(launcher: Launcher) -> anyhow::Result<ExitCode> {
    Ok(ExitCode::from(launcher.serve()?))
}

/// The cluster of that name, or the only one.
fn one(name: Option<String>) -> anyhow::Result<String> {
    if let Some(name) = name {
        return Ok(name);
    }
    let mut names = launcher::names()?;
    match names.len() {
        0 => bail!("there is no cluster: `weft mpi run` starts one"),
        1 => Ok(names.remove(0)),
        _ => bail!("there are several clusters, name one: {}", names.join(", ")),
    }
}

fn ask(cluster: Option<String>, request: &Request) -> anyhow::Result<ExitCode> {
    let name = one(cluster)?;
    match request::ask(&launcher::requests_socket(&name)?, request)? {
        Answer::Done(sentence) => {
            eprintln!("weft: {name}: {sentence}");
            Ok(ExitCode::SUCCESS)
        }
        Answer::Refused(why) => bail!("{name}: {why}"),
        Answer::Status(_) | Answer::Output(_) => bail!("{name}: an answer to another request"),
    }
}

fn create(args: MpiRunArgs) -> anyhow::Result<Launcher> {
    let slots = args.slots.unwrap_or(args.cpus);
    let machines = match args.one_machine {
        true => 1,
        false => args.vms.unwrap_or(args.hosts as u32),
    };
    check_processes(&args, machines, slots)?;
    let site = site(&args)?;
    let image = match &args.image {
        Some(image) => whole(image)?,
        None => beside()?,
    };
    let with = args.with.iter().map(|path| whole(path));
    let with: Vec<PathBuf> = with.collect::<Result<_, _>>()?;
    let mut program = args.program;
    let copied = program::to_copy(program.first(), &with, &image, args.no_copy)?;
    if let (Some(path), Some(first)) = (&copied, program.first_mut()) {
        let name = path.file_name().and_then(|name| name.to_str());
        *first = name.context("the program has no plain name")?.to_owned();
    }
    let name = match &args.name {
        Some(name) => name.clone(),
        None => name_from(program.first()),
    };
    if let Some(folder) = &args.save_to {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let cpu = CpuModel::from(args.cpu);
    let options = Options {
        one_machine: args.one_machine,
        machines,
        cpus: args.cpus,
        cpu: cpu.name().to_owned(),
        cpu_features: cpu
            .host_features()
            .iter()
            .map(ToString::to_string)
            .collect(),
        memory: args.memory,
        slots,
        processes: args.processes,
        hosts: args.hosts as usize,
        grow: args.grow,
        site,
        time: args.time,
        wait: args.wait,
        margin: args.margin,
        adaptive: !args.is_static,
        save_to: args.save_to.as_deref().map(whole).transpose()?,
        image,
        with,
        program,
        mpirun: args.mpirun,
        address: args.address,
        tap: args.tap,
    };
    launcher::create(&name, options, copied)
}

fn check_processes(args: &MpiRunArgs, machines: u32, slots: u32) -> anyhow::Result<()> {
    let all = machines.saturating_mul(slots);
    if let Some(processes) = args.processes.filter(|processes| *processes > all) {
        let more = if args.one_machine { "--cpus" } else { "--vms" };
        bail!(
            "{processes} processes do not fit on {machines} machines with {slots} slots each: ask \
             for more {more}, more --slots, or -n {all}"
        );
    }
    Ok(())
}

/// What gives the hosts.
fn site(args: &MpiRunArgs) -> anyhow::Result<SiteOptions> {
    ensure!(
        args.list.is_none() || args.on == OnArg::Local,
        "--list is for --on local"
    );
    let options = args.batch.clone();
    match args.on {
        OnArg::Slurm => Ok(SiteOptions::Slurm { options }),
        OnArg::Gridengine => Ok(SiteOptions::GridEngine { options }),
        OnArg::Local => {
            ensure!(
                options.is_empty(),
                "--batch is for --on slurm and --on gridengine"
            );
            Ok(SiteOptions::Local(match &args.list {
                Some(file) => listed(file)?,
                None => this_host(),
            }))
        }
    }
}

fn resume(args: MpiResumeArgs) -> anyhow::Result<Launcher> {
    let changes = Changes {
        hosts: args.hosts.map(|hosts| hosts as usize),
        time: args.time,
        wait: args.wait,
        batch: args.batch,
        address: args.address,
        list: args.list.as_deref().map(listed).transpose()?,
    };
    launcher::resume(&args.name, changes)
}

/// Also for processes with other working directories.
fn whole(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("cannot find {}", path.display()))
}

/// `guest` beside the folder of this program, as a build leaves it.
fn beside() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let base = own.parent().and_then(Path::parent);
    Ok(base.unwrap_or(Path::new("/")).join("guest"))
}

fn name_from(program: Option<&String>) -> String {
    let program = program.map_or("cluster", String::as_str);
    let name = program.rsplit('/').next().unwrap_or(program);
    let letters = name.chars().map(|letter| match letter {
        letter if letter.is_ascii_alphanumeric() => letter,
        _ => '-',
    });
    let name: String = letters.take(16).collect();
    match name.starts_with(|letter: char| letter.is_ascii_alphabetic()) {
        true => name,
        false => format!("mpi-{name}"),
    }
}

/// As often as a cluster may have hosts, and more: one is left while another one comes.
fn this_host() -> Vec<ListedHost> {
    let host = |number| ListedHost {
        name: format!("local-{number}"),
        through: Vec::new(),
        time_max: None,
    };
    (1..=2 * HOSTS_MAX).map(host).collect()
}

fn listed(file: &Path) -> anyhow::Result<Vec<ListedHost>> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("cannot read the list of hosts {}", file.display()))?;
    let mut hosts: Vec<ListedHost> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default();
        let mut words: Vec<&str> = line.split_whitespace().collect();
        if words.is_empty() {
            continue;
        }
        let wrong = |what: &str| format!("{}:{}: {what}", file.display(), number + 1);
        let name = words.remove(0).to_owned();
        if hosts.iter().any(|host| host.name == name) {
            bail!(wrong(&format!("{name} is there twice")));
        }
        let max = words.last().and_then(|word| word.strip_prefix("max="));
        let time_max = match max {
            None => None,
            Some(seconds) => {
                let seconds: u64 = seconds
                    .parse()
                    .map_err(|_| anyhow::anyhow!(wrong("write max=SECONDS")))?;
                words.pop();
                Some(Duration::from_secs(seconds))
            }
        };
        hosts.push(ListedHost {
            name,
            through: words.iter().map(Into::into).collect(),
            time_max,
        });
    }
    ensure!(!hosts.is_empty(), "{} names no host", file.display());
    Ok(hosts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_hosts_has_names_ways_and_bounds() {
        let file = std::env::temp_dir().join(format!("weft-list-{}", std::process::id()));
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            listed(&file).map_err(|error| error.to_string())
        };
        let hosts = read("# mine\nalpha ssh -q alpha max=60\n\nhere # this one\n").unwrap();
        assert_eq!(hosts[0].name, "alpha");
        assert_eq!(hosts[0].through, ["ssh", "-q", "alpha"]);
        assert_eq!(hosts[0].time_max, Some(Duration::from_secs(60)));
        assert_eq!(hosts[1].name, "here");
        assert!(hosts[1].through.is_empty());
        assert!(read("a\na\n").unwrap_err().contains(":2: a is there twice"));
        assert!(read("a max=x\n").unwrap_err().contains("max=SECONDS"));
        assert!(read("#\n").unwrap_err().contains("names no host"));
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn a_cluster_is_called_after_its_program() {
        let name = |program: &str| name_from(Some(&program.to_owned()));
        assert_eq!(name("./bin/ep.x"), "ep-x");
        assert_eq!(name("3d"), "mpi-3d");
        assert_eq!(name_from(None), "cluster");
    }
}
