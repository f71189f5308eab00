//! Kernel parameters that are added to the command line of Linux over several slices.

use weft_boot::ImageFile;

use super::configuration::Configuration;
use weft_aggregate::Placement;

/// In the first bytes of an initrd: its init brings up processors late.
const LATE_MARK: &[u8] = b"weft-late-vcpus";
/// Where that is looked for.
const MARK_BYTES: u64 = 4096;

/// The parameters for a machine of several slices; none for any other. One that the
/// configuration's command line has by itself is left as it is there.
pub(super) fn kernel_parameters(
    configuration: &Configuration,
    placement: &Placement,
    initrd: Option<&ImageFile>,
) -> Vec<String> {
    if placement.slices() < 2 {
        return Vec::new();
    }
    // The tables of all files and connections would be distributed over all slices.
    let mut parameters = vec!["hashdist=0".to_owned()];
    let first = placement.cpus_of(0).len() as u32;
    if first < placement.cpus() {
        // All vCPUs see one TSC (`slice/time`). To find that out by itself, Linux has
        // them fight over a page for 20 ms each, and a timer look at every one's twice
        // a second.
        parameters.push("tsc=reliable".to_owned());
        // Each vCPU's timers stay with it. Else one that is idle looks, for each timer that
        // an interrupt of its sets, into the other slices' run queues for one that is not;
        // and those with `nohz_full=` give all of theirs, a server's connections', away.
        parameters.push("sysctl.kernel.timer_migration=0".to_owned());
        if configuration.late_cpus.unwrap_or_else(|| marked(initrd)) {
            parameters.extend(late(first, placement.cpus() - 1));
        }
    }
    let given = |word: &String| {
        let name = name(word);
        let mut own = configuration.command_line.split_whitespace();
        !own.any(|own| self::name(own) == name)
    };
    parameters.retain(given);
    parameters
}

/// The parameters that have Linux bring up the vCPUs `first` to `last`, those of other
/// slices, after its boot.
fn late(first: u32, last: u32) -> [String; 5] {
    let others = match last {
        last if last == first => last.to_string(),
        last => format!("{first}-{last}"),
    };
    [
        format!("maxcpus={first}"),
        "weft.online=all".to_owned(),
        // Else the kernel takes the locks out of its code for a single processor, and
        // puts them back when the next one comes.
        "noreplace-smp".to_owned(),
        // A tick of a vCPU that runs one program would only ask for the pages of the
        // clock, which the primary's ticks change. A kernel without the option
        // ignores it.
        format!("nohz_full={others}"),
        // Each of these looks after its own callbacks, not after a neighbour's.
        "rcutree.rcu_nocb_gp_stride=1".to_owned(),
    ]
}

/// Whether an initrd says that its init brings up processors.
fn marked(initrd: Option<&ImageFile>) -> bool {
    let head = initrd.and_then(|initrd| initrd.read(0..initrd.size().min(MARK_BYTES)).ok());
    head.is_some_and(|head| memchr::memmem::find(&head, LATE_MARK).is_some())
}

/// A word without its value.
fn name(word: &str) -> &str {
    word.split_once('=').map_or(word, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words_of(slices: usize, cpus: u32, late: Option<bool>, line: &str) -> String {
        let memory_bytes = 256 << 20;
        let mut configuration = Configuration::new("vmlinux".into(), memory_bytes);
        configuration.late_cpus = late;
        configuration.command_line = line.to_owned();
        let placement = Placement::deal(slices, cpus, memory_bytes).expect("a placement");
        kernel_parameters(&configuration, &placement, None).join(" ")
    }

    #[test]
    fn only_several_slices_get_words() {
        assert_eq!(words_of(1, 2, Some(true), ""), "");
        let together = "hashdist=0 tsc=reliable sysctl.kernel.timer_migration=0";
        assert_eq!(words_of(2, 2, None, ""), together);
        assert_eq!(words_of(2, 1, Some(true), ""), "hashdist=0");
    }

    #[test]
    fn vcpus_of_other_slices_come_late() {
        let late = words_of(2, 2, Some(true), "");
        assert!(late.contains("maxcpus=1 weft.online=all"), "{late}");
        assert!(late.contains("nohz_full=1 "), "{late}");
        let four = words_of(2, 4, Some(true), "");
        assert!(four.contains("maxcpus=2 "), "{four}");
        assert!(four.contains("nohz_full=2-3 "), "{four}");
    }

    #[test]
    fn what_is_given_stays() {
        let line = "quiet tsc=unstable nohz_full=3";
        let words = words_of(2, 2, Some(true), line);
        assert!(!words.contains("tsc="), "{words}");
        assert!(!words.contains("nohz_full"), "{words}");
        assert!(words.contains("noreplace-smp"), "{words}");
    }
}
