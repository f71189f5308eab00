//! Two hosts out of one: a pair of network namespaces joined by a virtual cable.
//! Needs root and `ip`. Everything is removed when the value is dropped.

use std::ffi::OsString;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, ensure};

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
    /// Address of A.
    pub const ADDRESS_A: &str = "10.117.0.1";
    /// Address of B.
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
        for side in ['a', 'b'] {
            let namespace = self.name(side);
            command(
                "tc",
                &format!(
                    "-n {namespace} qdisc replace dev cable root tbf rate {rate} burst 256k latency 50ms"
                ),
            )?;
        }
        Ok(())
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
