//! Kernel parameters that are added to the command line of Linux over several slices.

use weft_boot::ImageFile;

use super::configuration::Configuration;
use weft_aggregate::Placement;

/// The mark of an initrd whose init brings up processors late.
const LATE_MARK: &[u8] = b"weft-late-vcpus";
/// The first bytes of an initrd, in which the mark is searched.
const MARK_BYTES: u64 = 4096;

/// The parameters for a machine of several slices, or of one that others may join; for another
/// of one slice no parameters. A parameter that the configuration's command line has already is
/// not added.
pub(super) fn kernel_parameters(
    configuration: &Configuration,
    placement: &Placement,
    initrd: Option<&ImageFile>,
) -> Vec<String> {
    if configuration.slices.is_empty() {
        return Vec::new();
    }
    // Otherwise the hash tables of files and connections are distributed over all slices.
    let mut parameters = vec!["hashdist=0".to_owned()];
    let first = placement.cpus_of(0).len() as u32;
    // vCPUs of one slice may go to others later.
    let may_part = placement.slices() == 1 && placement.cpus() > 1;
    if first < placement.cpus() || may_part {
        // All vCPUs see one TSC (`weft_aggregate`, `time.rs`). To test that, Linux makes each
        // vCPU contend for a page for 20 ms, and a timer check every vCPU twice a second.
        parameters.push("tsc=reliable".to_owned());
        // Each vCPU keeps its timers. Otherwise an idle vCPU searches the run queues of the
        // other slices for a busy one at each timer, and vCPUs with `nohz_full=` move all of
        // their timers, such as those of a server's connections, to others.
        parameters.push("sysctl.kernel.timer_migration=0".to_owned());
    }
    if first < placement.cpus() && configuration.late_cpus.unwrap_or_else(|| marked(initrd)) {
        parameters.extend(late(first, placement.cpus() - 1));
    }
    let given = |parameter: &String| {
        let name = name(parameter);
        let mut own = configuration.command_line.split_whitespace();
        !own.any(|own| self::name(own) == name)
    };
    parameters.retain(given);
    parameters
}

/// The parameters with which Linux brings up vCPUs `first` to `last`, which are on other
/// slices, after its boot.
fn late(first: u32, last: u32) -> [String; 5] {
    let others = match last {
        last if last == first => last.to_string(),
        last => format!("{first}-{last}"),
    };
    [
        format!("maxcpus={first}"),
        "weft.online=all".to_owned(),
        // Otherwise the kernel removes the lock prefixes from its code while it has a single
        // processor, and restores them when the next comes online.
        "noreplace-smp".to_owned(),
        // A tick of a vCPU that runs one program would only request the pages of the clock,
        // which the primary's ticks change. A kernel without this option ignores it.
        format!("nohz_full={others}"),
        // Each of these vCPUs' callback threads serves only that vCPU.
        "rcutree.rcu_nocb_gp_stride=1".to_owned(),
    ]
}

/// Whether an initrd says that its init brings up processors.
fn marked(initrd: Option<&ImageFile>) -> bool {
    let head = initrd.and_then(|initrd| initrd.read(0..initrd.size().min(MARK_BYTES)).ok());
    head.is_some_and(|head| memchr::memmem::find(&head, LATE_MARK).is_some())
}

/// A parameter without its value.
fn name(parameter: &str) -> &str {
    parameter
        .split_once('=')
        .map_or(parameter, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `slices`: 0 for a machine that stays alone.
    fn added_to(slices: usize, cpus: u32, late: Option<bool>, line: &str) -> String {
        let memory_bytes = 256 << 20;
        let mut configuration = Configuration::new("vmlinux".into(), memory_bytes);
        configuration.late_cpus = late;
        configuration.command_line = line.to_owned();
        let placement = match slices {
            0 => Placement::whole(cpus, memory_bytes),
            _ => Placement::deal(slices, cpus, memory_bytes).expect("a placement"),
        };
        if slices > 0 {
            configuration.slices = placement.shares().to_vec();
        }
        kernel_parameters(&configuration, &placement, None).join(" ")
    }

    #[test]
    fn only_slices_that_may_share_get_parameters() {
        assert_eq!(added_to(0, 2, Some(true), ""), "");
        let together = "hashdist=0 tsc=reliable sysctl.kernel.timer_migration=0";
        assert_eq!(added_to(2, 2, None, ""), together);
        assert_eq!(added_to(2, 1, Some(true), ""), "hashdist=0");
        assert_eq!(added_to(1, 1, Some(true), ""), "hashdist=0");
        // All vCPUs come up with the boot: none is elsewhere yet.
        assert_eq!(added_to(1, 2, Some(true), ""), together);
    }

    #[test]
    fn vcpus_of_other_slices_come_late() {
        let late = added_to(2, 2, Some(true), "");
        assert!(late.contains("maxcpus=1 weft.online=all"), "{late}");
        assert!(late.contains("nohz_full=1 "), "{late}");
        let four = added_to(2, 4, Some(true), "");
        assert!(four.contains("maxcpus=2 "), "{four}");
        assert!(four.contains("nohz_full=2-3 "), "{four}");
    }

    #[test]
    fn what_is_given_stays() {
        let line = "quiet tsc=unstable nohz_full=3";
        let parameters = added_to(2, 2, Some(true), line);
        assert!(!parameters.contains("tsc="), "{parameters}");
        assert!(!parameters.contains("nohz_full"), "{parameters}");
        assert!(parameters.contains("noreplace-smp"), "{parameters}");
    }
}
