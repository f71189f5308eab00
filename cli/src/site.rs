//! `weft cluster serve`, `log` and `access`: what people and programs see of a cluster.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use weft_cluster::{LogRecord, Role, seconds_now};
use weft_node::member::Membership;
use weft_node::rundir;
use weft_node::said::plain;
use weft_store::{Embedded, TlsFiles};
use weft_web::{Gateway, Listen, Server};

use crate::args::{AccessCommand, RoleArg, ServeArgs, StoreServeArgs};
use crate::table::{self, Align};

/// How often `--follow` looks.
const FOLLOW: Duration = Duration::from_millis(500);
/// The server's socket, in the run directory.
const SOCKET: &str = "web.sock";

/// `weft cluster serve`.
pub fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    let (_, cluster) = Membership::joined()?;
    let name = cluster.identity().name.clone();
    let path = match &args.socket {
        Some(path) => path.clone(),
        None => rundir::directory()?.join(SOCKET),
    };
    let tls = args.tls_certificate.clone().zip(args.tls_key.clone());
    let listen = Listen {
        address: args.listen,
        tls,
    };
    let server = Server::bind(cluster, &path, Some(&listen))?;
    eprintln!(
        "weft: serves the cluster {name}, at {} without a key; this link has one that is good as \
         long as this command runs:",
        path.display()
    );
    if let Some(link) = server.link() {
        println!("{link}");
    }
    server.run(std::future::pending())?;
    Ok(())
}

/// `weft cluster store`.
pub fn store(args: &StoreServeArgs) -> anyhow::Result<()> {
    let files = args.store_authority.clone();
    let files = files.zip(args.store_certificate.clone().zip(args.store_key.clone()));
    let tls = files.map(|(authority, (certificate, key))| TlsFiles {
        authority,
        certificate,
        key,
    });
    let store = Arc::new(Embedded::open(&args.file)?);
    let gateway = Gateway::bind(store, args.listen, tls.as_ref())?;
    eprintln!(
        "weft: serves {} as the store etcd://{}, until this command is ended",
        args.file.display(),
        gateway.address().context("it listens")?
    );
    gateway.run(std::future::pending())?;
    Ok(())
}

/// `weft cluster log`.
pub fn log(follow: bool, json: bool) -> anyhow::Result<()> {
    let (_, cluster) = Membership::joined()?;
    let mut last = 0;
    loop {
        for record in cluster.log_after(last)? {
            match json {
                true => println!("{}", serde_json::to_string(&record)?),
                false => println!("{}", line(&record)),
            }
            last = record.number;
        }
        if !follow {
            return Ok(());
        }
        // A log that is empty still is read as a whole again.
        std::thread::sleep(FOLLOW);
    }
}

/// A record as `weft cluster log` prints it: the time is UTC.
pub fn line(record: &LogRecord) -> String {
    format!(
        "{}  {:<6}  {}",
        time_of(record.at),
        record.kind.name(),
        plain(&record.what)
    )
}

/// Seconds since 1970 as `2026-11-26 21:05:09`, in UTC.
fn time_of(seconds: u64) -> String {
    let time = jiff::Timestamp::from_second(seconds.try_into().unwrap_or(i64::MAX));
    time.map_or_else(
        |_| seconds.to_string(),
        |time| time.strftime("%F %T").to_string(),
    )
}

/// A line of `weft cluster access list --json`.
#[derive(Serialize)]
struct KeyLine<'a> {
    name: &'a str,
    role: Role,
    good_until: u64,
    good: bool,
}

/// `weft cluster access`.
pub fn access(command: &AccessCommand) -> anyhow::Result<()> {
    let (_, cluster) = Membership::joined()?;
    match command {
        AccessCommand::Make { name, role, days } => {
            let role = match role {
                RoleArg::Look => Role::Look,
                RoleArg::Run => Role::Run,
            };
            let secret = cluster.make_access(name, role, Duration::from_secs(days * 86400))?;
            eprintln!(
                "weft: this key lets a client {} for {days} days; it is shown once:",
                match role {
                    Role::Look => "look at everything",
                    Role::Run => "run the cluster",
                }
            );
            println!("{secret}");
        }
        AccessCommand::End { name } => {
            cluster.end_access(name)?;
            eprintln!("weft: the key {name} is of no use any more");
        }
        AccessCommand::List { json } => {
            let keys = cluster.access().context("cannot read the keys")?;
            let now = seconds_now();
            let lines = keys.list().into_iter().map(|key| KeyLine {
                name: &key.name,
                role: key.role,
                good_until: key.good_until,
                good: now < key.good_until,
            });
            let lines: Vec<KeyLine<'_>> = lines.collect();
            if *json {
                println!("{}", serde_json::to_string_pretty(&lines)?);
            } else {
                print!("{}", show_keys(&lines));
            }
        }
    }
    Ok(())
}

fn show_keys(lines: &[KeyLine<'_>]) -> String {
    let row = |line: &KeyLine<'_>| {
        let until = match line.good {
            true => time_of(line.good_until),
            false => "too old".to_owned(),
        };
        vec![line.name.to_owned(), line.role.name().to_owned(), until]
    };
    let rows: Vec<Vec<String>> = lines.iter().map(row).collect();
    let head = [
        ("KEY", Align::Left),
        ("MAY", Align::Left),
        ("UNTIL (UTC)", Align::Left),
    ];
    table::render(&head, &rows)
}
