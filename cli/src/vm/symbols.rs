//! The kernel's names for addresses: from its System.map, or its ELF symbol table.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use object::{Object, ObjectSymbol};

/// Where Linux maps its image: this plus the physical address.
pub const IMAGE_BASE: u64 = 0xffff_ffff_8000_0000;
/// Longest file that is read, in bytes: Debian's vmlinux with its symbols has some
/// 50 MB, one with debug information 1 GB.
const FILE_BYTES_MAX: u64 = 2 << 30;

/// Names by address.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Symbols {
    /// In order of addresses; one name for each.
    names: Vec<(u64, String)>,
    /// Further names of the same addresses, in the same order.
    aliases: Vec<(u64, String)>,
    /// Of the image in memory.
    image: (u64, u64),
    /// Of what each CPU has of its own: relative to the base of its GS. From 0 on, or
    /// (since Linux 6.15) where the image has it.
    per_cpu: (u64, u64),
}

impl Symbols {
    /// Reads a System.map, or an ELF image with a symbol table.
    pub fn read(path: &Path) -> anyhow::Result<Symbols> {
        let cannot = || format!("cannot read the kernel's symbols from {}", path.display());
        let length = fs::metadata(path).with_context(cannot)?.len();
        if length > FILE_BYTES_MAX {
            bail!("{}: too large for a kernel's symbol file", path.display());
        }
        let bytes = fs::read(path).with_context(cannot)?;
        let symbols = if bytes.starts_with(b"\x7fELF") {
            from_elf(&bytes).with_context(cannot)?
        } else {
            from_map(&String::from_utf8_lossy(&bytes))
        };
        if symbols.image == (0, 0) {
            bail!(
                "{} has no symbol _text or _end: give a System.map, or a vmlinux with symbols",
                path.display()
            );
        }
        if symbols.image.0 < IMAGE_BASE || symbols.image.1 < symbols.image.0 {
            bail!(
                "{} has the kernel at {:#x}-{:#x}, which is not an address of an x86-64 kernel",
                path.display(),
                symbols.image.0,
                symbols.image.1
            );
        }
        Ok(symbols)
    }

    /// Of the kernel at `kernel`, wherever they may be had: the System.map beside it,
    /// or the kernel itself. `None` when there are none.
    pub fn beside(kernel: &Path) -> Option<(PathBuf, Symbols)> {
        let map = kernel.with_file_name("System.map");
        [map, kernel.to_owned()]
            .into_iter()
            .find_map(|path| Self::read(&path).ok().map(|symbols| (path, symbols)))
    }

    fn new(mut all: Vec<(u64, String)>) -> Symbols {
        let find = |name: &str| {
            let found = all.iter().find(|(_, known)| known == name);
            found.map_or(0, |(address, _)| *address)
        };
        let image = (find("_text"), find("_end"));
        let per_cpu = (find("__per_cpu_start"), find("__per_cpu_end"));
        // Of several names for one address the shortest says most, and one of a
        // section's limits least.
        all.sort_by_key(|(address, name)| (*address, name.starts_with("__"), name.len()));
        let mut aliases = Vec::new();
        all.dedup_by(|further, first| {
            let same = further.0 == first.0;
            if same {
                aliases.push((further.0, std::mem::take(&mut further.1)));
            }
            same
        });
        Symbols {
            names: all,
            aliases,
            image,
            per_cpu,
        }
    }

    /// The name that `address` lies behind, and how far.
    pub fn at(&self, address: u64) -> Option<(&str, u64)> {
        let behind = self.names.partition_point(|(start, _)| *start <= address);
        let (start, name) = self.names.get(behind.checked_sub(1)?)?;
        // What begins at 0 and what is mapped have nothing between them.
        let between = *start < self.image.0 && address >= self.per_cpu.1;
        (!between).then_some((name.as_str(), address - start))
    }

    /// The address of a guest-physical one in the kernel's image, if it lies there.
    pub fn in_image(&self, physical: u64) -> Option<u64> {
        let address = IMAGE_BASE.checked_add(physical)?;
        (self.image.0..self.image.1)
            .contains(&address)
            .then_some(address)
    }

    /// The name of what lies so far behind the base of a CPU's GS.
    pub fn of_cpu(&self, offset: u64) -> Option<&str> {
        let own = (self.per_cpu.0..self.per_cpu.1).contains(&offset);
        self.at(offset).filter(|_| own).map(|(name, _)| name)
    }

    /// Guest-physical addresses of what has this name in the kernel's image, up to the
    /// next name; more than one where several files of the kernel have such a thing.
    pub fn named(&self, name: &str) -> Vec<Range<u64>> {
        let ours = |(address, known): &&(u64, String)| {
            known == name
                && (self.image.0..self.image.1).contains(address)
                && !(self.per_cpu.0..self.per_cpu.1).contains(address)
        };
        let found = self.names.iter().chain(&self.aliases).filter(ours);
        let range = |(start, _): &(u64, String)| {
            let behind = self.names.partition_point(|(other, _)| other <= start);
            let end = self.names.get(behind).map_or(self.image.1, |next| next.0);
            start - IMAGE_BASE..end.min(self.image.1).max(start + 1) - IMAGE_BASE
        };
        found.map(range).collect()
    }

    /// Whether each CPU has something of this name of its own.
    pub fn is_of_cpus(&self, name: &str) -> bool {
        let mut all = self.names.iter().chain(&self.aliases);
        all.any(|(address, known)| {
            known == name && (self.per_cpu.0..self.per_cpu.1).contains(address)
        })
    }

    /// Names that begin within these addresses, and the one that reaches into them.
    pub fn within(&self, start: u64, length: u64) -> Vec<&str> {
        let first = self.names.partition_point(|(address, _)| *address <= start);
        self.names
            .iter()
            .skip(first.saturating_sub(1))
            .take_while(|(address, _)| *address < start.saturating_add(length))
            .map(|(_, name)| name.as_str())
            .collect()
    }
}

fn from_map(text: &str) -> Symbols {
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let address = u64::from_str_radix(words.next()?, 16).ok()?;
        let kind = words.next()?;
        // Absolute ones are numbers, not places.
        let place = !matches!(kind, "A" | "a" | "U" | "?");
        place.then(|| Some((address, words.next()?.to_owned())))?
    };
    Symbols::new(text.lines().filter_map(line).collect())
}

fn from_elf(bytes: &[u8]) -> anyhow::Result<Symbols> {
    let file = object::File::parse(bytes)?;
    let names = file.symbols().filter_map(|symbol| {
        let name = symbol.name().ok().filter(|name| !name.is_empty())?;
        symbol
            .section_index()
            .map(|_| (symbol.address(), name.to_owned()))
    });
    Ok(Symbols::new(names.collect()))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A kernel of three pages at 16 MiB, and a CPU's own area.
    pub const MAP: &str = "\
0000000000000000 D __per_cpu_start
0000000000001200 D runqueues
0000000000020000 D __per_cpu_end
ffffffff81000000 T _text
ffffffff81000040 T __schedule
ffffffff81001980 D jiffies_64
ffffffff81001980 D jiffies
ffffffff81001a00 D jiffies_lock
ffffffff81003000 B _end
";

    pub fn map() -> Symbols {
        from_map(MAP)
    }

    impl Symbols {
        pub fn of_map(text: &str) -> Symbols {
            from_map(text)
        }
    }

    #[test]
    fn names_are_found_by_address() {
        let symbols = from_map(MAP);
        assert_eq!(
            symbols.at(0xffff_ffff_8100_0050),
            Some(("__schedule", 0x10))
        );
        assert_eq!(symbols.at(0xffff_ffff_8100_1980), Some(("jiffies", 0)));
        assert_eq!(symbols.at(0x30_0000), None);
        assert_eq!(symbols.of_cpu(0x1300), Some("runqueues"));
        assert_eq!(symbols.of_cpu(0x20000), None);
        assert_eq!(symbols.in_image(0x100_1000), Some(0xffff_ffff_8100_1000));
        assert_eq!(symbols.in_image(0x200_0000), None);
        let page = symbols.within(0xffff_ffff_8100_1000, 4096);
        assert_eq!(page, ["__schedule", "jiffies", "jiffies_lock"]);
    }

    #[test]
    fn other_files_are_refused_by_name() {
        let path = std::env::temp_dir().join(format!("weft-symbols-{}", std::process::id()));
        fs::write(&path, "not a map\n").unwrap();
        let error = Symbols::read(&path).unwrap_err().to_string();
        assert!(error.contains("has no symbol _text"), "{error}");
        fs::write(&path, "ffff800080000000 T _text\nffff800081000000 B _end\n").unwrap();
        let error = Symbols::read(&path).unwrap_err().to_string();
        assert!(
            error.contains("not an address of an x86-64 kernel"),
            "{error}"
        );
        fs::write(&path, b"\x7fELFbroken").unwrap();
        assert!(Symbols::read(&path).is_err());
        fs::remove_file(&path).unwrap();
        let error = format!("{:#}", Symbols::read(&path).unwrap_err());
        assert!(error.contains("No such file"), "{error}");
    }
}
