//! A machine whose card is at a switch goes to another host for good, and connects to the switch
//! there. Another machine, which stays, asks it all the time.

use std::fs::{self, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use super::home::at_work;
use super::migration::mode;
use super::{BOUND, LONG_BOUND, SWITCH, Site, wait_until};
use crate::boot::SMALL;
use crate::executable;
use crate::guest::Guest;
use crate::namespace::{self, Star};

/// As whom a lender of the site runs machines of others.
const LENT_USER: u32 = 60100;
const PORT: u16 = 7200;

/// `weft switch`, which ends when this is dropped.
struct Switch {
    child: Child,
    orders: ChildStdin,
}

impl Switch {
    /// On a host of the site, as the user of the machine there; the first two have it at one path.
    fn start(site: &Site<'_>, host: usize) -> Result<Switch> {
        let (own, place) = (site.own_disks(host), site.own_disks(0));
        let identity = site.identity(host);
        let user = if host == 1 { LENT_USER } else { 0 };
        fs::set_permissions(&own, Permissions::from_mode(0o777))?;
        let key = own.join("switch.key");
        fs::copy(identity.directory.join("node.key"), &key)?;
        fs::set_permissions(&key, Permissions::from_mode(0o600))?;
        chown(&key, Some(user), Some(user))?;
        // That user may not get to where this one is.
        let weft = own.join("weft");
        executable::copy(&site.bench.context.weft, &weft)?;
        let mut words = site.star.prefix(host);
        words.extend(namespace::with_directory(&own, &place));
        let user = user.to_string();
        words.extend(
            [
                "setpriv",
                "--reuid",
                &user,
                "--regid",
                &user,
                "--clear-groups",
            ]
            .map(Into::into),
        );
        words.push(place.join("weft").into());
        let listen = format!("{}:{PORT}", Star::address(host));
        words.extend(["switch", "--listen", &listen, "--machines"].map(Into::into));
        words.push(place.join(SWITCH).into());
        words.extend(["--key".into(), place.join("switch.key").into()]);
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(fs::File::create(own.join("switch.err"))?)
            .spawn()?;
        let orders = child.stdin.take().context("no pipe")?;
        let socket = own.join(SWITCH);
        wait_until("its socket", || Ok(socket.exists()))?;
        Ok(Switch { child, orders })
    }

    fn knows(&mut self, site: &Site<'_>, others: [usize; 2]) -> Result<()> {
        for host in others {
            let key = &site.identity(host).key;
            let address = format!("{}:{PORT}", Star::address(host));
            let order = serde_json::json!({ "peer": { "key": key, "address": address } });
            writeln!(self.orders, "{order}")?;
        }
        Ok(())
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        // It is this test's own child, which has not been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A machine on the third host that asks 10.9.0.1 for ever, and says how often it got an answer.
fn asking(site: &Site<'_>) -> Result<Guest> {
    let [kernel, initrd] = SMALL;
    let script = "ip link set eth0 up; ip addr add 10.9.0.2/24 dev eth0; n=0; while :; do \
                  ping -c 1 -W 1 10.9.0.1 >/dev/null && n=$((n+1)) && echo got $n.; done";
    let socket = site.own_disks(2).join(SWITCH);
    let mut command = site.weft_at(2, &["vm", "run", "--name", "q", "--backend", "soft"]);
    command.arg("--memory").arg("128M");
    command
        .arg("--net")
        .arg(format!("switch={}", socket.display()));
    command.args([
        "--cmdline",
        &format!("console=ttyS0 quiet weft.run=\"{script}\""),
    ]);
    command.arg("--kernel").arg(site.images.file(kernel)?);
    command.arg("--initrd").arg(site.images.file(initrd)?);
    Guest::start(&mut command)
}

/// The answers that it has got until now.
pub(super) fn answers(asking: &mut Guest) -> u32 {
    // Takes what has come.
    let _ = asking.wait_for("nobody says this", std::time::Duration::from_millis(10));
    let number = |text: &str| text.strip_prefix("got ")?.strip_suffix('.')?.parse().ok();
    let lines = asking.lines().iter().rev();
    lines
        .filter_map(|line| number(line.text.trim()))
        .next()
        .unwrap_or(0)
}

pub(super) fn more(asking: &mut Guest, count: u32) -> Result<u32> {
    let wanted = answers(asking) + count;
    let got = asking.wait_for(&format!("got {wanted}."), BOUND);
    ensure!(got.is_some(), "{:?}", asking.lines().last());
    Ok(wanted)
}

pub(super) fn from_switch_to_switch(site: &mut Site<'_>) -> Result<String> {
    let mut here = Switch::start(site, 0)?;
    let mut there = Switch::start(site, 1)?;
    let mut third = Switch::start(site, 2)?;
    here.knows(site, [1, 2])?;
    there.knows(site, [0, 2])?;
    third.knows(site, [0, 1])?;
    let socket = site.own_disks(0).join(SWITCH);
    let network = format!("switch={},mac=02:00:00:00:00:01", socket.display());
    let script = "ip link set eth0 up; ip addr add 10.9.0.1/24 dev eth0; echo at work; read line";
    site.start_as(&site.home, &["--net", &network], script)?;
    at_work(site)?;
    let mut asking = asking(site)?;
    let first = asking.wait_for("got 10.", BOUND);
    ensure!(first.is_some(), "no answer: {:?}", asking.lines().last());
    let before = answers(&mut asking);
    site.go(0, 1, mode(1))?;
    let after = more(&mut asking, 20)?;
    // Nothing goes by way of the host that it has left.
    drop(here);
    more(&mut asking, 20)?;
    let mut console = site.console_at(1)?;
    console.write("over\n")?;
    console.finish(LONG_BOUND)?;
    asking.kill()?;
    site.all_given_back()?;
    Ok(format!("{before} answers before it went, {after} in all"))
}
