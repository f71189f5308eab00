//! A real etcd, started for one test, ended by its processes' numbers.

use super::Folder;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use weft_store::{Etcd, EtcdOptions, Store, TlsFiles};

/// All members answer within this.
const UP_MAX: Duration = Duration::from_secs(60);

pub struct Cluster {
    folder: Folder,
    /// (client port, peer port)
    ports: Vec<(u16, u16)>,
    members: Vec<Option<Child>>,
}

impl Cluster {
    /// `None` where this machine has no etcd. Three members and more talk TLS.
    pub fn start(count: usize) -> Option<Cluster> {
        if ["etcd", "openssl"].iter().any(|program| lacks(program)) {
            return None;
        }
        let cluster = Cluster {
            folder: Folder::new(),
            ports: (0..count).map(|_| (free_port(), free_port())).collect(),
            members: Vec::new(),
        };
        if cluster.has_tls() {
            make_certificates(cluster.folder.path());
        }
        let mut cluster = cluster;
        for number in 0..count {
            let member = cluster.run(number);
            cluster.members.push(Some(member));
        }
        let store = cluster.store();
        let begun = Instant::now();
        while let Err(error) = store.read("") {
            assert!(begun.elapsed() < UP_MAX, "etcd does not come up: {error}");
            std::thread::sleep(Duration::from_millis(100));
        }
        Some(cluster)
    }

    fn has_tls(&self) -> bool {
        self.ports.len() > 1
    }

    fn run(&self, number: usize) -> Child {
        let scheme = if self.has_tls() { "https" } else { "http" };
        let (client, peer) = self.ports[number];
        let url = |port: u16| format!("{scheme}://127.0.0.1:{port}");
        let all = self.ports.iter().enumerate();
        let all: Vec<String> = all
            .map(|(n, &(_, peer))| format!("e{n}={}", url(peer)))
            .collect();
        let folder = self.folder.path();
        let log = std::fs::File::create(folder.join(format!("e{number}.log"))).unwrap();
        let data = folder.join(format!("e{number}"));
        std::fs::create_dir_all(&data).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(&data, mode).unwrap();
        let mut command = Command::new("etcd");
        command
            .args([
                "--name",
                &format!("e{number}"),
                "--initial-cluster-token",
                "weft",
            ])
            .arg("--data-dir")
            .arg(data)
            .args(["--initial-cluster", &all.join(",")])
            .args([
                "--listen-client-urls",
                &url(client),
                "--advertise-client-urls",
                &url(client),
            ])
            .args([
                "--listen-peer-urls",
                &url(peer),
                "--initial-advertise-peer-urls",
                &url(peer),
            ])
            .args(["--logger", "zap", "--log-level", "warn"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        if self.has_tls() {
            for side in ["", "peer-"] {
                command.arg(format!("--{side}client-cert-auth"));
                for (option, file) in [
                    ("trusted-ca-file", "ca.crt"),
                    ("cert-file", "member.crt"),
                    ("key-file", "member.key"),
                ] {
                    command
                        .arg(format!("--{side}{option}"))
                        .arg(folder.join(file));
                }
            }
        }
        command.spawn().expect("etcd starts")
    }

    pub fn store(&self) -> Etcd {
        let members: Vec<String> = self
            .ports
            .iter()
            .map(|(client, _)| format!("127.0.0.1:{client}"))
            .collect();
        let tls = self.has_tls().then(|| files(self.folder.path(), "node"));
        let url = format!("etcd://{}", members.join(","));
        Etcd::new(&EtcdOptions::parse(&url, tls).unwrap()).unwrap()
    }

    pub fn kill(&mut self, number: usize) {
        let mut child = self.members[number].take().expect("it runs");
        child.kill().expect("it runs");
        child.wait().expect("it was started here");
    }

    pub fn restart(&mut self, number: usize) {
        self.members[number] = Some(self.run(number));
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for number in 0..self.members.len() {
            if self.members[number].is_some() {
                self.kill(number);
            }
        }
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("it is bound").port()
}

/// Whether a program is not installed: then a test is skipped.
pub fn lacks(program: &str) -> bool {
    let known = Command::new(program).arg("version").output().is_ok();
    if !known {
        weft_test_support::skipped(&format!("a store with {program}: it is not installed"));
    }
    !known
}

/// What [`make_certificates`] made for the `member`s or for a `node`.
pub fn files(folder: &Path, side: &str) -> TlsFiles {
    TlsFiles {
        authority: folder.join("ca.crt"),
        certificate: folder.join(format!("{side}.crt")),
        key: folder.join(format!("{side}.key")),
    }
}

/// An authority, a certificate of all members, and one of the client.
pub fn make_certificates(folder: &Path) {
    let openssl = |arguments: &str| {
        let done = Command::new("openssl")
            .args(arguments.split_whitespace())
            .current_dir(folder)
            .output()
            .expect("openssl runs");
        assert!(
            done.status.success(),
            "{}",
            String::from_utf8_lossy(&done.stderr)
        );
    };
    openssl("ecparam -name prime256v1 -genkey -noout -out ca.key");
    openssl("req -x509 -new -key ca.key -days 30 -subj /CN=weft-test -out ca.crt");
    for (name, extensions) in [
        (
            "member",
            "extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=IP:127.0.0.1\n",
        ),
        ("node", "extendedKeyUsage=clientAuth\n"),
    ] {
        std::fs::write(folder.join("extensions"), extensions).unwrap();
        openssl(&format!(
            "ecparam -name prime256v1 -genkey -noout -out {name}.key"
        ));
        openssl(&format!(
            "req -new -key {name}.key -subj /CN={name} -out {name}.csr"
        ));
        openssl(&format!(
            "x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile \
             extensions -out {name}.crt"
        ));
    }
}
