//! `--update`: which pages are kept up to date on all nodes.

use std::ops::Range;

use super::args::VmRunArgs;
use super::error::VmError;
use super::symbols::Symbols;

const PAGE: u64 = 4096;

/// Guest-physical addresses, of whole pages, of all that `--update` names.
pub fn ranges(args: &VmRunArgs, is_shared: bool) -> Result<Vec<Range<u64>>, VmError> {
    if args.update.is_empty() {
        return Ok(Vec::new());
    }
    if !is_shared {
        return Err(wrong(
            "a machine on one node has no copies of pages: add --nodes, --on or --growable \
             yes",
        ));
    }
    let mut symbols = None;
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for word in &args.update {
        let range = match addresses(word) {
            Some(range) => range?,
            None => {
                let symbols = match &mut symbols {
                    Some(symbols) => symbols,
                    none => none.insert(read(args)?),
                };
                named(symbols, word)?
            }
        };
        // A page holds more than one of them.
        if !ranges.contains(&range) {
            ranges.push(range);
        }
    }
    Ok(ranges)
}

fn wrong(what: impl std::fmt::Display) -> VmError {
    VmError::Option(format!("--update: {what}"))
}

fn read(args: &VmRunArgs) -> Result<Symbols, VmError> {
    match &args.system_map {
        Some(path) => Symbols::read(path).map_err(|error| wrong(format_args!("{error:#}"))),
        None => match Symbols::beside(&args.kernel) {
            Some((_, symbols)) => Ok(symbols),
            None => Err(wrong(format_args!(
                "{} has no symbols, and there is no System.map beside it: give one with \
                --system-map, or give addresses",
                args.kernel.display()
            ))),
        },
    }
}

/// The pages of `0xSTART-0xEND`; none if it is a name.
fn addresses(word: &str) -> Option<Result<Range<u64>, VmError>> {
    let rest = word.strip_prefix("0x")?;
    let parsed = rest.split_once('-').and_then(|(start, end)| {
        let end = end.strip_prefix("0x").unwrap_or(end);
        let start = u64::from_str_radix(start, 16).ok()?;
        Some(start..u64::from_str_radix(end, 16).ok()?)
    });
    Some(match parsed {
        Some(range) if !range.is_empty() => Ok(pages(range)),
        _ => Err(wrong(format_args!(
            "{word}: addresses must be given as 0xSTART-0xEND, with the end above the start"
        ))),
    })
}

fn pages(range: Range<u64>) -> Range<u64> {
    let end = range.end.div_ceil(PAGE).saturating_mul(PAGE);
    range.start / PAGE * PAGE..end
}

fn named(symbols: &Symbols, name: &str) -> Result<Range<u64>, VmError> {
    match &symbols.named(name)[..] {
        [range] => Ok(pages(range.clone())),
        [] if symbols.is_of_cpus(name) => Err(wrong(format_args!(
            "{name}: this is a per-CPU variable: only variables in the kernel's image can be given"
        ))),
        [] => Err(wrong(format_args!(
            "{name}: the kernel has no such symbol (`weft vm trace` shows symbols)"
        ))),
        all => {
            let all: Vec<String> = all
                .iter()
                .map(|range| format!("{:#x}-{:#x}", range.start, range.end))
                .collect();
            Err(wrong(format_args!(
                "{name}: the kernel has several symbols of that name: give the addresses of \
                one, {}",
                all.join(" or ")
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::symbols::tests::map;

    #[test]
    fn names_and_addresses_become_pages() {
        let symbols = map();
        let jiffies = 0x100_1000..0x100_2000;
        for name in ["jiffies", "jiffies_64"] {
            assert_eq!(named(&symbols, name).unwrap(), jiffies, "{name}");
        }
        // Up to the next name, which is the image's end.
        let lock = named(&symbols, "jiffies_lock").unwrap();
        assert_eq!(lock, 0x100_1000..0x100_3000);
        let given = addresses("0x1001980-0x1002001").unwrap().unwrap();
        assert_eq!(given, 0x100_1000..0x100_3000);
        assert_eq!(addresses("0x1000-2000").unwrap().unwrap(), 0x1000..0x2000);
        assert!(addresses("jiffies").is_none());
    }

    #[test]
    fn what_is_not_there_is_refused_by_name() {
        let symbols = map();
        let text = |name| named(&symbols, name).unwrap_err().to_string();
        assert!(text("jiffie").contains("jiffie: the kernel has no such symbol"));
        assert!(text("runqueues").contains("per-CPU variable"));
        // Since Linux 6.15 the image has the template of each CPU's own.
        let symbols = Symbols::of_map(
            "ffffffff81000000 T _text\n\
             ffffffff81001000 D __per_cpu_start\n\
             ffffffff81001200 D runqueues\n\
             ffffffff81002000 D __per_cpu_end\n\
             ffffffff81003000 B _end\n",
        );
        let error = named(&symbols, "runqueues").unwrap_err().to_string();
        assert!(error.contains("per-CPU variable"), "{error}");
        for word in ["0x", "0x5", "0x5-0x5", "0x6-0x5", "0x5-zz", "0x5-0x10-0x20"] {
            let error = addresses(word).unwrap().unwrap_err().to_string();
            assert!(error.contains("0xSTART-0xEND"), "{word}: {error}");
        }
    }
}
