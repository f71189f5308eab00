//! The archive of a cluster: its keys and programs, which all its machines find in memory
//! (`docs/guest.md`, The image for MPI), behind the image's own.
//!
//! The format is the kernel's "newc" (`Documentation/driver-api/early-userspace/
//! buffer-format.rst`).

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};

use super::folder::Folder;

/// Programs and files take this much of each machine's memory at most.
const BYTES_MAX: u64 = 1 << 30;
/// Kinds of files (`stat.h`).
const FOLDER: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;

/// Makes the keys and the archive in the cluster's folder. The answer is the initrd's path.
pub fn make(
    image: &Path,
    folder: &Folder,
    program: Option<&Path>,
    with: &[PathBuf],
) -> anyhow::Result<PathBuf> {
    let system = image.join("mpi/root.cpio");
    ensure!(
        system.exists() && image.join("vmlinux").exists(),
        "there is no image for MPI in {}: `make guest-mpi` makes it, and --image says where it is",
        image.display()
    );
    let path = folder.file("initrd");
    let mut options = fs::OpenOptions::new();
    let options = options.write(true).create(true).truncate(true).mode(0o600);
    let file = options
        .open(&path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    let mut file = io::BufWriter::new(file);
    let mut system = fs::File::open(&system)?;
    io::copy(&mut system, &mut file).with_context(|| format!("cannot write {}", path.display()))?;
    let mut archive = Archive {
        to: file,
        inode: 1,
        bytes: 0,
    };
    for name in [
        "cluster",
        "cluster/ssh",
        "cluster/bin",
        "cluster/lib",
        "cluster/home",
    ] {
        archive.member(name, FOLDER | 0o755, b"")?;
    }
    for key in ["host_key", "id"] {
        let (private, public) = make_key(image, folder, key)?;
        archive.member(&format!("cluster/ssh/{key}"), FILE | 0o644, &private)?;
        archive.member(&format!("cluster/ssh/{key}.pub"), FILE | 0o644, &public)?;
        if key == "id" {
            archive.member("cluster/ssh/authorized_keys", FILE | 0o644, &public)?;
        }
    }
    if let Some(program) = program {
        archive.file(
            program,
            &format!("cluster/bin/{}", file_name(program)?),
            true,
        )?;
    }
    for path in with {
        if path.is_dir() {
            archive.folder(path, "cluster")?;
        } else {
            archive.file(path, &format!("cluster/home/{}", file_name(path)?), false)?;
        }
    }
    archive.member("TRAILER!!!", 0, b"")?;
    archive.to.flush()?;
    Ok(path)
}

fn file_name(path: &Path) -> anyhow::Result<&str> {
    let name = path.file_name().and_then(|name| name.to_str());
    name.with_context(|| format!("{} has no plain name", path.display()))
}

/// A program of the image for the user's host, with its own loader and libraries.
pub fn host_program(image: &Path, name: &str) -> Command {
    let host = image.join("mpi/host");
    let mut command = Command::new(host.join("ld-linux-x86-64.so.2"));
    command
        .arg("--library-path")
        .arg(&host)
        .arg(host.join(name));
    command
}

/// Both halves of a key, in dropbear's format and in ssh's. One that exists stays.
fn make_key(image: &Path, folder: &Folder, name: &str) -> anyhow::Result<(Vec<u8>, Vec<u8>)> {
    let path = folder.file(name);
    let run = |arguments: &[&str]| -> anyhow::Result<Vec<u8>> {
        let output = host_program(image, "dropbearkey")
            .args(arguments)
            .arg("-f")
            .arg(&path)
            .stdin(Stdio::null())
            .output()
            .context("cannot start dropbearkey of the image")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            bail!(
                "dropbearkey made no key {}: {}",
                path.display(),
                said.trim()
            );
        }
        Ok(output.stdout)
    };
    if !path.exists() {
        run(&["-t", "ed25519"])?;
    }
    let said = String::from_utf8(run(&["-y"])?)?;
    let line = said.lines().find(|line| line.starts_with("ssh-ed25519 "));
    let words = line.map(|line| line.split(' ').take(2).collect::<Vec<_>>().join(" "));
    let public = words.context("dropbearkey shows no public key")? + "\n";
    fs::write(path.with_extension("pub"), &public)?;
    Ok((fs::read(&path)?, public.into_bytes()))
}

struct Archive<W> {
    to: W,
    inode: u32,
    bytes: u64,
}

impl<W: Write> Archive<W> {
    fn member(&mut self, name: &str, mode: u32, contents: &[u8]) -> anyhow::Result<()> {
        self.bytes += contents.len() as u64;
        ensure!(
            self.bytes <= BYTES_MAX,
            "the program and its files have more than {} MiB, which each machine would have in \
             memory",
            BYTES_MAX >> 20
        );
        let fields = [
            self.inode,
            mode,
            0,
            0,
            1,
            0,
            contents.len() as u32,
            0,
            0,
            0,
            0,
            name.len() as u32 + 1,
            0,
        ];
        self.inode += 1;
        let mut head = String::from("070701");
        for field in fields {
            head += &format!("{field:08X}");
        }
        head += name;
        head.push('\0');
        self.padded(head.as_bytes())?;
        self.padded(contents)?;
        Ok(())
    }

    fn padded(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.to.write_all(bytes)?;
        let padding = bytes.len().next_multiple_of(4) - bytes.len();
        self.to.write_all(&[0; 4][..padding])
    }

    fn file(&mut self, path: &Path, name: &str, executable: bool) -> anyhow::Result<()> {
        let read = || -> io::Result<(Vec<u8>, u32)> {
            let mode = fs::metadata(path)?.permissions().mode();
            Ok((fs::read(path)?, mode))
        };
        let (contents, mode) = read().with_context(|| format!("cannot read {}", path.display()))?;
        let permissions = match executable || mode & 0o111 != 0 {
            true => 0o755,
            false => 0o644,
        };
        self.member(name, FILE | permissions, &contents)
    }

    /// What is in the folder, sorted.
    fn folder(&mut self, path: &Path, name: &str) -> anyhow::Result<()> {
        let read = || -> io::Result<Vec<fs::DirEntry>> { fs::read_dir(path)?.collect() };
        let mut entries = read().with_context(|| format!("cannot read {}", path.display()))?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            let name = format!("{name}/{}", file_name(&path)?);
            let kind = entry.file_type()?;
            if kind.is_symlink() {
                let target = fs::read_link(&path)?;
                let target = target.as_os_str().as_encoded_bytes();
                self.member(&name, LINK | 0o777, target)?;
            } else if kind.is_dir() {
                self.member(&name, FOLDER | 0o755, b"")?;
                self.folder(&path, &name)?;
            } else if kind.is_file() {
                self.file(&path, &name, false)?;
            } else {
                bail!("{} is neither file, folder nor link", path.display());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_headers_names_and_contents_padded_to_four() {
        let mut archive = Archive {
            to: Vec::new(),
            inode: 1,
            bytes: 0,
        };
        archive.member("cluster/a", FILE | 0o755, b"hello").unwrap();
        archive.member("TRAILER!!!", 0, b"").unwrap();
        let bytes = archive.to;
        assert_eq!(bytes.len() % 4, 0);
        let head = std::str::from_utf8(&bytes[..110]).unwrap();
        assert_eq!(&head[..22], "07070100000001000081ED");
        assert_eq!(&head[54..62], "00000005", "the length of the contents");
        assert_eq!(
            &head[94..102],
            "0000000A",
            "the length of the name with its zero"
        );
        assert_eq!(&bytes[110..120], b"cluster/a\0");
        assert_eq!(&bytes[120..128], b"hello\0\0\0");
        assert_eq!(&bytes[128..134], b"070701");
    }
}
