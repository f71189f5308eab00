//! An etcd of three members with TLS, each on a host of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;

use super::started::{Started, Words};
use crate::namespace::Star;

pub const COUNT: usize = 3;
/// Longer than etcd's own: the test's processors are busy. Shorter than a leader's lease.
const HEARTBEAT_MS: u32 = 200;
const ELECTION_MS: u32 = 2000;

pub struct Etcd {
    directory: PathBuf,
    /// The hosts of the network that the members are on.
    hosts: [usize; COUNT],
    members: [Option<Started>; COUNT],
}

impl Etcd {
    /// All members run, and may not answer yet.
    pub fn start(star: &Star, hosts: [usize; COUNT], directory: &Path) -> Result<Etcd> {
        fs::create_dir_all(directory)?;
        make_certificates(directory, &hosts.map(Star::address))?;
        let mut etcd = Etcd {
            directory: directory.to_owned(),
            hosts,
            members: [const { None }; COUNT],
        };
        for member in 0..COUNT {
            etcd.run(star, member)?;
        }
        Ok(etcd)
    }

    /// What the options `--store` and the three for its certificates take.
    pub fn options(&self) -> Vec<String> {
        let all = self
            .hosts
            .map(|host| format!("{}:2379", Star::address(host)));
        let file = |name: &str| self.directory.join(name).to_string_lossy().into_owned();
        [
            ("--store", format!("etcd://{}", all.join(","))),
            ("--store-authority", file("ca.crt")),
            ("--store-certificate", file("node.crt")),
            ("--store-key", file("node.key")),
        ]
        .into_iter()
        .flat_map(|(option, value)| [option.to_owned(), value])
        .collect()
    }

    /// Starts a member, for the first time or with what it has kept.
    pub fn run(&mut self, star: &Star, member: usize) -> Result<()> {
        let name = |member: usize| format!("e{member}");
        let url = |member: usize, port: u16| {
            format!("https://{}:{port}", Star::address(self.hosts[member]))
        };
        let all: Vec<String> = (0..COUNT)
            .map(|member| format!("{}={}", name(member), url(member, 2380)))
            .collect();
        let data = self.directory.join(name(member));
        fs::create_dir_all(&data)?;
        fs::set_permissions(&data, fs::Permissions::from_mode(0o700))?;
        let (client, peer) = (url(member, 2379), url(member, 2380));
        let mut line = format!(
            "etcd --name {} --data-dir {} --initial-cluster-token weft --initial-cluster {} \
             --listen-client-urls {client} --advertise-client-urls {client} \
             --listen-peer-urls {peer} --initial-advertise-peer-urls {peer} \
             --heartbeat-interval {HEARTBEAT_MS} --election-timeout {ELECTION_MS} \
             --logger zap --log-level error",
            name(member),
            data.display(),
            all.join(","),
        );
        for side in ["", "peer-"] {
            let folder = self.directory.display();
            line += &format!(
                " --{side}client-cert-auth --{side}trusted-ca-file {folder}/ca.crt \
                 --{side}cert-file {folder}/member.crt --{side}key-file {folder}/member.key"
            );
        }
        self.members[member] = Some(Started::begin(Words {
            prefix: star.prefix(self.hosts[member]),
            command: line.split_whitespace().map(Into::into).collect(),
            environment: Vec::new(),
            directory: &self.directory,
            name: &format!("log-{member}"),
        })?);
        Ok(())
    }

    pub fn kill(&mut self, member: usize) {
        if let Some(mut process) = self.members[member].take() {
            process.signal(Signal::SIGKILL);
        }
    }

    pub fn runs(&self, member: usize) -> bool {
        self.members[member].is_some()
    }

    pub fn signal(&mut self, member: usize, signal: Signal) {
        if let Some(process) = &mut self.members[member] {
            process.signal(signal);
        }
    }

    /// A member that nobody killed has ended.
    pub fn failed(&mut self) -> Option<String> {
        let folder = &self.directory;
        self.members.iter_mut().flatten().find_map(|process| {
            let end = process.end()?;
            let said = process.said();
            let last = said.lines().last().unwrap_or_default();
            Some(format!("etcd in {}: {end}: {last}", folder.display()))
        })
    }
}

/// An authority, a certificate of all members, and one of the hosts.
fn make_certificates(folder: &Path, addresses: &[String]) -> Result<()> {
    let openssl = |arguments: &str| {
        let words = arguments.split_whitespace();
        let output = Command::new("openssl")
            .args(words)
            .current_dir(folder)
            .output();
        let output = output.context("cannot run openssl")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "openssl {arguments}: {said}");
        Ok(())
    };
    openssl("ecparam -name prime256v1 -genkey -noout -out ca.key")?;
    openssl("req -x509 -new -key ca.key -days 30 -subj /CN=weft-test -out ca.crt")?;
    let names: Vec<String> = addresses.iter().map(|at| format!("IP:{at}")).collect();
    let member = format!(
        "extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName={}\n",
        names.join(",")
    );
    for (name, extensions) in [
        ("member", &member[..]),
        ("node", "extendedKeyUsage=clientAuth\n"),
    ] {
        fs::write(folder.join("extensions"), extensions)?;
        openssl(&format!(
            "ecparam -name prime256v1 -genkey -noout -out {name}.key"
        ))?;
        openssl(&format!(
            "req -new -key {name}.key -subj /CN={name} -out {name}.csr"
        ))?;
        openssl(&format!(
            "x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 \
             -extfile extensions -out {name}.crt"
        ))?;
    }
    Ok(())
}
