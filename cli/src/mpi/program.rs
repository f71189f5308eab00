//! Which program machines get, and whether they could execute it.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use object::LittleEndian;
use object::elf::{EM_X86_64, FileHeader64};

/// The file to copy; none if the machines have the program.
pub fn to_copy(
    program: Option<&String>,
    with: &[PathBuf],
    image: &Path,
    no_copy: bool,
) -> anyhow::Result<Option<PathBuf>> {
    let Some(program) = program.filter(|_| !no_copy) else {
        return Ok(None);
    };
    if program.starts_with('-') {
        bail!("`{program}` is no option of `weft mpi run`: --help lists them");
    }
    if !program.contains('/') {
        let is_there = |folder: &PathBuf| folder.join("bin").join(program).exists();
        if with.iter().any(is_there) {
            return Ok(None);
        }
        // The image's own examples.
        let own = image.join("mpi").join(program);
        if own.is_file() {
            return Ok(Some(own));
        }
        if !Path::new(program).exists() {
            bail!(
                "there is no program {program} here, nor in a folder of --with: write its path, or \
                 --no-copy if the image has it"
            );
        }
    }
    let path = std::path::absolute(program).with_context(|| format!("cannot find {program}"))?;
    check(&path)?;
    Ok(Some(path))
}

/// A program for x86-64, or a script.
fn check(path: &Path) -> anyhow::Result<()> {
    let named = || format!("cannot read the program {}", path.display());
    let mut head = Vec::new();
    let file = File::open(path).with_context(named)?;
    if !file.metadata().with_context(named)?.is_file() {
        bail!("the program {} is no file", path.display());
    }
    file.take(64).read_to_end(&mut head).with_context(named)?;
    if head.starts_with(b"#!") {
        return Ok(());
    }
    if !head.starts_with(b"\x7fELF") {
        bail!(
            "{} is neither a program (ELF) nor a script (#!)",
            path.display()
        );
    }
    match object::from_bytes::<FileHeader64<LittleEndian>>(&head) {
        Ok((header, _)) if header.e_machine.get(LittleEndian) == EM_X86_64 && head[4] == 2 => {
            Ok(())
        }
        _ => bail!(
            "{} is a program for another machine: the machines of a cluster are x86-64",
            path.display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_for_this_kind_of_machine() {
        let folder = std::env::temp_dir().join(format!("weft-mpi-program-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let check = |bytes: &[u8]| {
            let path = folder.join("program");
            std::fs::write(&path, bytes).unwrap();
            super::check(&path).map_err(|error| error.to_string())
        };
        let own = std::fs::read("/proc/self/exe").unwrap();
        check(&own[..64]).unwrap();
        check(b"#!/bin/sh\n").unwrap();
        let mut other = own[..64].to_vec();
        other[18] = 183;
        assert!(check(&other).unwrap_err().contains("another machine"));
        assert!(check(&own[..20]).unwrap_err().contains("another machine"));
        assert!(check(b"hello").unwrap_err().contains("neither"));
        let error = to_copy(Some(&"no-such".into()), &[], &folder, false).unwrap_err();
        assert!(error.to_string().contains("--no-copy"), "{error}");
        let error = to_copy(Some(&"-np".into()), &[], &folder, false).unwrap_err();
        assert!(error.to_string().contains("no option"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
