//! Hosts out of one: a pair of network namespaces joined by a virtual cable, or
//! one with a tap device for a guest.
//! Needs root and `ip`. Everything is removed when the value is dropped.

use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::sched::{CloneFlags, setns};

/// Two namespaces, A and B, that see each other and nothing else.
#[derive(Debug)]
pub struct Pair {
    id: String,
}

fn command(program: &str, arguments: &str) -> Result<()> {
    let output = Command::new(program)
        .args(arguments.split_whitespace())
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {arguments}: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

/// Why there can be no namespaces here, if so.
pub fn missing() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("network namespaces need root".to_string());
    }
    let probe = format!("weft-probe-{}", std::process::id());
    if let Err(error) = command("ip", &format!("netns add {probe}")) {
        return Some(format!("no network namespaces: {error:#}"));
    }
    // It was just made; a failure to remove it shows in `ip netns`.
    let _ = command("ip", &format!("netns del {probe}"));
    None
}

impl Pair {
    pub const ADDRESS_A: &str = "10.117.0.1";
    pub const ADDRESS_B: &str = "10.117.0.2";

    /// Makes both and the cable.
    pub fn new() -> Result<Pair> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let pair = Pair {
            id: format!(
                "{}-{}",
                std::process::id(),
                COUNT.fetch_add(1, Ordering::Relaxed)
            ),
        };
        let (a, b) = (pair.name('a'), pair.name('b'));
        command("ip", &format!("netns add {a}"))?;
        command("ip", &format!("netns add {b}"))?;
        command(
            "ip",
            &format!("-n {a} link add cable type veth peer name cable netns {b}"),
        )?;
        for (namespace, address) in [(&a, Pair::ADDRESS_A), (&b, Pair::ADDRESS_B)] {
            command(
                "ip",
                &format!("-n {namespace} address add {address}/24 dev cable"),
            )?;
            command("ip", &format!("-n {namespace} link set lo up"))?;
            command("ip", &format!("-n {namespace} link set cable up"))?;
        }
        Ok(pair)
    }

    fn name(&self, side: char) -> String {
        format!("weft-{side}-{}", self.id)
    }

    /// The words before a command that run it in namespace `side` ('a' or 'b').
    pub fn prefix(&self, side: char) -> Vec<OsString> {
        ["ip", "netns", "exec", &self.name(side)]
            .map(OsString::from)
            .to_vec()
    }

    /// Pulls the cable, or puts it back.
    pub fn cut(&self, cut: bool) -> Result<()> {
        let state = if cut { "down" } else { "up" };
        command(
            "ip",
            &format!("-n {} link set cable {state}", self.name('b')),
        )
    }

    /// Shapes both directions to `rate` ("1gbit"), as `tc tbf` does it. The
    /// bucket holds one timer tick at that rate and the largest segment.
    pub fn shape(&self, rate: &str) -> Result<()> {
        ['a', 'b']
            .iter()
            .try_for_each(|side| shape(&self.name(*side), "cable", rate))
    }
}

fn shape(namespace: &str, device: &str, rate: &str) -> Result<()> {
    command(
        "tc",
        &format!(
            "-n {namespace} qdisc replace dev {device} root tbf rate {rate} burst 256k latency 50ms"
        ),
    )
}

/// Several namespaces whose cables lead to one switch.
#[derive(Debug)]
pub struct Star {
    id: String,
    hosts: usize,
}

impl Star {
    /// Makes all of them, `hosts` and the switch.
    pub fn new(hosts: usize) -> Result<Star> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let star = Star {
            id: format!("{}-{count}", std::process::id()),
            hosts,
        };
        let switch = star.switch();
        command("ip", &format!("netns add {switch}"))?;
        command("ip", &format!("-n {switch} link add switch type bridge"))?;
        command("ip", &format!("-n {switch} link set switch up"))?;
        for host in 0..hosts {
            let name = star.name(host);
            command("ip", &format!("netns add {name}"))?;
            for arguments in [
                format!("-n {switch} link add port{host} type veth peer name cable netns {name}"),
                format!("-n {switch} link set port{host} master switch up"),
                format!("-n {name} address add {}/24 dev cable", Star::address(host)),
                format!("-n {name} link set lo up"),
                format!("-n {name} link set cable up"),
            ] {
                command("ip", &arguments)?;
            }
        }
        Ok(star)
    }

    fn name(&self, host: usize) -> String {
        format!("weft-star{host}-{}", self.id)
    }

    /// A VXLAN over these hosts, and on each a bridge with a tap device.
    pub fn vxlan(&self, hosts: &[usize], tap: &str, mtu: u32) -> Result<()> {
        for host in hosts {
            let (name, address) = (self.name(*host), Star::address(*host));
            for arguments in [
                format!("link add vxlan type vxlan id 77 local {address} dev cable dstport 4789"),
                "link add site type bridge".to_owned(),
                format!("tuntap add {tap} mode tap"),
                format!("link set {tap} mtu {mtu} master site up"),
                "link set vxlan master site up".to_owned(),
                "link set site up".to_owned(),
            ] {
                command("ip", &format!("-n {name} {arguments}"))?;
            }
            for other in hosts.iter().filter(|other| *other != host) {
                let to = Star::address(*other);
                let entry = format!("-n {name} fdb append 00:00:00:00:00:00 dev vxlan dst {to}");
                command("bridge", &entry)?;
            }
        }
        Ok(())
    }

    /// A host has the device no more.
    pub fn remove_tap(&self, host: usize, tap: &str) -> Result<()> {
        command("ip", &format!("-n {} link del {tap}", self.name(host)))
    }

    /// The bytes that a host's processes have sent through a tap device.
    pub fn sent(&self, host: usize, tap: &str) -> Result<u64> {
        let prefix = self.prefix(host);
        let output = Command::new(&prefix[0])
            .args(&prefix[1..])
            .arg("cat")
            .arg(format!("/sys/class/net/{tap}/statistics/rx_bytes"))
            .output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        let bytes = said.trim().parse();
        bytes.with_context(|| format!("no counter of {tap}: {output:?}"))
    }

    fn switch(&self) -> String {
        format!("weft-switch-{}", self.id)
    }

    /// The address of a host, counted from 0.
    pub fn address(host: usize) -> String {
        format!("10.119.0.{}", host + 1)
    }

    /// The words before a command that run it on a host.
    pub fn prefix(&self, host: usize) -> Vec<OsString> {
        ["ip", "netns", "exec", &self.name(host)]
            .map(OsString::from)
            .to_vec()
    }

    /// The host's line in a list of hosts for `weft mpi run --list`: `h` and its number.
    pub fn list_line(&self, host: usize) -> Result<String> {
        let words = self.prefix(host).into_iter().map(OsString::into_string);
        let words: Result<Vec<String>, _> = words.collect();
        let words = words.map_err(|word| anyhow::anyhow!("{} is no text", word.display()))?;
        Ok(format!("h{host} {}\n", words.join(" ")))
    }

    /// The same, where the host says that it is another one: `boot_id` is shown as
    /// that of its kernel.
    pub fn prefix_as(&self, host: usize, boot_id: &std::path::Path) -> Vec<OsString> {
        const SHOW: &str = "mount --bind \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"";
        let mut words = self.prefix(host);
        words.extend(["sh", "-c", SHOW].map(OsString::from));
        words.push(boot_id.into());
        words
    }

    /// Puts a tap device on a host, on the same network as its cable: a bridge joins both,
    /// and has the host's address. This user may open it.
    pub fn add_tap(&self, host: usize, device: &str, user: u32) -> Result<()> {
        let (name, address) = (self.name(host), Star::address(host));
        for arguments in [
            "link add lan type bridge".to_owned(),
            format!("tuntap add dev {device} mode tap user {user}"),
            format!("link set {device} master lan up"),
            format!("address del {address}/24 dev cable"),
            "link set cable master lan".to_owned(),
            format!("address add {address}/24 dev lan"),
            "link set lan up".to_owned(),
        ] {
            command("ip", &format!("-n {name} {arguments}"))?;
        }
        Ok(())
    }

    /// The host's network, for `setns`.
    pub fn namespace(&self, host: usize) -> Result<File> {
        let path = Path::new("/run/netns").join(self.name(host));
        File::open(&path).with_context(|| format!("{}", path.display()))
    }

    /// Runs this in a thread that has the host's network.
    pub fn within<T: Send>(
        &self,
        host: usize,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        let namespace = self.namespace(host)?;
        thread::scope(|scope| {
            let thread = scope.spawn(move || {
                setns(namespace, CloneFlags::CLONE_NEWNET)?;
                work()
            });
            let outcome = thread.join();
            outcome.map_err(|_| anyhow!("the thread panicked"))?
        })
    }

    /// Has what a host sends to others vanish on its way, or arrive again: it takes an address
    /// of the link layer that nobody has for theirs.
    pub fn mislead(&self, host: usize, others: &[usize], misled: bool) -> Result<()> {
        let name = self.name(host);
        for &other in others.iter().filter(|other| **other != host) {
            let address = Star::address(other);
            let rest = match misled {
                true => "lladdr 02:00:00:00:00:01 nud permanent",
                false => "",
            };
            let verb = if misled { "replace" } else { "del" };
            command(
                "ip",
                &format!("-n {name} neigh {verb} {address} dev cable {rest}"),
            )?;
        }
        Ok(())
    }

    /// Shapes what each host sends and gets to `rate` ("1gbit"), as [`Pair::shape`] does.
    pub fn shape(&self, rate: &str) -> Result<()> {
        for host in 0..self.hosts {
            shape(&self.name(host), "cable", rate)?;
            shape(&self.switch(), &format!("port{host}"), rate)?;
        }
        Ok(())
    }

    /// The number of a host's namespace, as `/proc/PID/ns/net` shows it.
    pub fn number(&self, host: usize) -> Result<u64> {
        let path = Path::new("/run/netns").join(self.name(host));
        let file = path.metadata();
        let file = file.with_context(|| format!("{}", path.display()))?;
        Ok(std::os::unix::fs::MetadataExt::ino(&file))
    }

    /// Pulls a host's cable, or puts it back.
    pub fn cut(&self, host: usize, cut: bool) -> Result<()> {
        let state = if cut { "down" } else { "up" };
        let switch = self.switch();
        command("ip", &format!("-n {switch} link set port{host} {state}"))
    }
}

impl Drop for Star {
    fn drop(&mut self) {
        let names = (0..self.hosts).map(|host| self.name(host));
        for name in names.chain([self.switch()]) {
            if let Err(error) = command("ip", &format!("netns del {name}")) {
                eprintln!("{error:#}");
            }
        }
    }
}

/// Words before a command that is run in a namespace: every user may open /dev/net/tun for it,
/// as most distributions have it. `node` is a device file that is made if it is not there.
pub fn with_tun(node: &Path) -> Vec<OsString> {
    const OPEN: &str = "{ [ -e \"$0\" ] || mknod -m 666 \"$0\" c 10 200; } && \
        mount --bind \"$0\" /dev/net/tun; exec \"$@\"";
    let mut words = ["sh", "-c", OPEN].map(OsString::from).to_vec();
    words.push(node.into());
    words
}

/// Words that run a command for which `own` is at `place`, in a mount namespace of its own.
pub fn with_directory(own: &Path, place: &Path) -> Vec<OsString> {
    const BIND: &str = "mount --bind \"$0\" \"$1\" && shift && exec \"$@\"";
    let mut words = ["sh", "-c", BIND].map(OsString::from).to_vec();
    words.extend([own.into(), place.into()]);
    words
}

/// A namespace with a tap device in it, and nothing else.
#[derive(Debug)]
pub struct TapHost {
    name: String,
}

impl TapHost {
    /// The tap device.
    pub const DEVICE: &str = "weft-tap";
    /// The host's address on it.
    pub const ADDRESS: &str = "10.118.0.1";
    /// For the guest, as its `weft.net=` takes it.
    pub const GUEST: &str = "10.118.0.2";

    /// Makes both.
    pub fn new() -> Result<TapHost> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let host = TapHost {
            name: format!("weft-tap-{}-{count}", std::process::id()),
        };
        let (name, device) = (&host.name, TapHost::DEVICE);
        command("ip", &format!("netns add {name}"))?;
        for arguments in [
            format!("tuntap add dev {device} mode tap"),
            format!("address add {}/24 dev {device}", TapHost::ADDRESS),
            format!("link set {device} up"),
            "link set lo up".to_string(),
        ] {
            command("ip", &format!("-n {name} {arguments}"))?;
        }
        Ok(host)
    }

    /// The words before a command that run it there.
    pub fn prefix(&self) -> Vec<OsString> {
        ["ip", "netns", "exec", &self.name]
            .map(OsString::from)
            .to_vec()
    }
}

impl Drop for TapHost {
    fn drop(&mut self) {
        if let Err(error) = command("ip", &format!("netns del {}", self.name)) {
            eprintln!("{error:#}");
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for side in ['a', 'b'] {
            if let Err(error) = command("ip", &format!("netns del {}", self.name(side))) {
                eprintln!("{error:#}");
            }
        }
    }
}
