//! Finds the program that the user named and refuses, before anything starts,
//! what the runtime could not load.
//!
//! A script is resolved here to its interpreter, as `execve` would do it: the
//! runtime only ever loads ELF.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::LaunchError;

/// Scripts that name scripts that name scripts: Linux allows this many.
const INTERPRETERS_MAX: usize = 4;
/// Bytes of a `#!` line that Linux looks at.
const SHEBANG_BYTES_MAX: usize = 256;

/// What to load and what to hand it.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    /// Absolute path of an ELF file for this machine.
    pub path: PathBuf,
    /// The whole argument vector, the name first.
    pub arguments: Vec<OsString>,
}

/// Resolves `name` through `search_path` (the value of `PATH`) and checks it.
pub fn resolve(
    name: &OsStr,
    arguments: &[OsString],
    search_path: Option<&OsStr>,
) -> Result<Program, LaunchError> {
    let mut path = find(name, search_path)?;
    let mut vector = vec![name.to_owned()];
    vector.extend_from_slice(arguments);
    for _ in 0..=INTERPRETERS_MAX {
        let head = read_head(&path)?;
        let Some((interpreter, argument)) = shebang(&head) else {
            check_elf(&path, &head)?;
            return Ok(Program {
                path,
                arguments: vector,
            });
        };
        // As Linux does it: the script's own path takes the place of its name.
        vector[0] = path.into_os_string();
        if let Some(argument) = argument {
            vector.insert(0, argument);
        }
        vector.insert(0, interpreter.clone());
        path = find(&interpreter, None)?;
    }
    Err(not_executable(
        &path,
        format!("its interpreter is itself a script, more than {INTERPRETERS_MAX} deep"),
    ))
}

fn not_executable(path: &Path, why: impl Into<String>) -> LaunchError {
    LaunchError::NotExecutable {
        path: path.to_owned(),
        why: why.into(),
    }
}

/// Finds the file. A name without a slash is looked up in `search_path`; as in
/// a shell, a file there without permission only counts when no other is found.
fn find(name: &OsStr, search_path: Option<&OsStr>) -> Result<PathBuf, LaunchError> {
    let not_found = || LaunchError::NotFound(name.to_string_lossy().into_owned());
    if name.is_empty() {
        return Err(not_found());
    }
    if name.as_bytes().contains(&b'/') {
        let path = absolute(Path::new(name))?;
        return executable(&path).map(|()| path);
    }
    let search_path = search_path.ok_or_else(not_found)?;
    let mut refused = None;
    for directory in std::env::split_paths(search_path) {
        let path = absolute(&directory.join(name))?;
        match executable(&path) {
            Ok(()) => return Ok(path),
            Err(LaunchError::NotFound(_)) => {}
            Err(other) => refused = refused.or(Some(other)),
        }
    }
    Err(refused.unwrap_or_else(not_found))
}

fn absolute(path: &Path) -> Result<PathBuf, LaunchError> {
    std::path::absolute(path).map_err(LaunchError::system(format!(
        "find the absolute path of {}",
        path.display()
    )))
}

fn executable(path: &Path) -> Result<(), LaunchError> {
    let metadata = match path.metadata() {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(not_executable(path, error.to_string()));
        }
        Err(_) => return Err(LaunchError::NotFound(path.display().to_string())),
    };
    if metadata.is_dir() {
        return Err(not_executable(path, "it is a directory"));
    }
    if !metadata.is_file() {
        return Err(not_executable(path, "it is not a regular file"));
    }
    let allowed = nix::unistd::access(path, nix::unistd::AccessFlags::X_OK).is_ok();
    if !allowed || metadata.permissions().mode() & 0o111 == 0 {
        return Err(not_executable(
            path,
            "it has no permission to execute (chmod +x gives it)",
        ));
    }
    Ok(())
}

fn read_head(path: &Path) -> Result<Vec<u8>, LaunchError> {
    let unreadable = |source| LaunchError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let mut head = Vec::with_capacity(SHEBANG_BYTES_MAX);
    File::open(path)
        .map_err(unreadable)?
        .take(SHEBANG_BYTES_MAX as u64)
        .read_to_end(&mut head)
        .map_err(unreadable)?;
    Ok(head)
}

/// The interpreter and its one argument, when `head` starts with `#!`.
fn shebang(head: &[u8]) -> Option<(OsString, Option<OsString>)> {
    let line = head.strip_prefix(b"#!")?;
    let line = line.split(|byte| *byte == b'\n').next()?.trim_ascii();
    let end = line
        .iter()
        .position(u8::is_ascii_whitespace)
        .unwrap_or(line.len());
    let (interpreter, rest) = line.split_at(end);
    let rest = rest.trim_ascii();
    let text = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    (!interpreter.is_empty()).then(|| (text(interpreter), (!rest.is_empty()).then(|| text(rest))))
}

/// Refuses what is not a 64-bit little-endian x86 executable.
fn check_elf(path: &Path, head: &[u8]) -> Result<(), LaunchError> {
    const HEADER_BYTES: usize = 64;
    const ET_EXEC: u16 = 2;
    const ET_DYN: u16 = 3;
    const EM_X86_64: u16 = 62;
    if !head.starts_with(b"\x7fELF") {
        let why = "it is not an ELF program (and has no `#!` line)";
        return Err(not_executable(path, why));
    }
    if head.get(4) == Some(&1) {
        let why = "it is a 32-bit program; Weft runs 64-bit x86 programs";
        return Err(not_executable(path, why));
    }
    if head.len() < HEADER_BYTES || head[4] != 2 {
        return Err(not_executable(
            path,
            "its ELF header is cut short or damaged",
        ));
    }
    let field = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
    if head[5] != 1 || field(18) != EM_X86_64 {
        let machine = match (head[5], field(18)) {
            (1, 183) => "64-bit Arm".to_owned(),
            (1, 243) => "RISC-V".to_owned(),
            (1, number) => format!("machine {number}"),
            _ => "a big-endian machine".to_owned(),
        };
        let why = format!("it is a program for {machine}; Weft runs 64-bit x86 programs");
        return Err(not_executable(path, why));
    }
    match field(16) {
        ET_EXEC | ET_DYN => Ok(()),
        kind => Err(not_executable(
            path,
            format!("it is an ELF file of type {kind}, not a program"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A directory of one test, which goes with this value.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let name = format!("weft-program-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(&path).unwrap();
            Scratch(path)
        }

        fn file(&self, name: &str, bytes: &[u8], mode: u32) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn elf(class: u8, kind: u16, machine: u16) -> Vec<u8> {
        let mut head = vec![0; 64];
        head[..4].copy_from_slice(b"\x7fELF");
        head[4] = class;
        head[5] = 1;
        head[16..18].copy_from_slice(&kind.to_le_bytes());
        head[18..20].copy_from_slice(&machine.to_le_bytes());
        head
    }

    fn refusal(path: &Path) -> (i32, String) {
        let error = resolve(path.as_os_str(), &[], None).unwrap_err();
        (error.exit_code(), error.to_string())
    }

    #[test]
    fn a_name_is_found_in_the_path() {
        let program = resolve(
            OsStr::new("ls"),
            &["-l".into()],
            Some(OsStr::new("/none:/bin")),
        );
        let program = program.unwrap();
        assert_eq!(program.path, Path::new("/bin/ls"));
        assert_eq!(program.arguments, ["ls", "-l"]);
    }

    #[test]
    fn each_refusal_says_what_is_wrong() {
        let scratch = Scratch::new("refusals");
        let file = |name, bytes: &[u8], mode| scratch.file(name, bytes, mode);
        let missing = resolve(OsStr::new("no-such"), &[], Some(OsStr::new("/bin"))).unwrap_err();
        assert_eq!(missing.exit_code(), 127);
        assert_eq!(refusal(Path::new("/nowhere/at/all")).0, 127);
        assert_eq!(refusal(Path::new("/tmp")).0, 126);
        let (code, text) = refusal(&file("plain", b"\x7fELF", 0o644));
        assert!(code == 126 && text.contains("chmod +x"), "{text}");
        let (code, text) = refusal(&file("text", b"hello", 0o755));
        assert!(code == 126 && text.contains("not an ELF"), "{text}");
        let (_, text) = refusal(&file("short", b"\x7fELF\x02", 0o755));
        assert!(text.contains("cut short"), "{text}");
        let (_, text) = refusal(&file("i386", &elf(1, 2, 3), 0o755));
        assert!(text.contains("32-bit"), "{text}");
        let (_, text) = refusal(&file("arm", &elf(2, 2, 183), 0o755));
        assert!(text.contains("64-bit Arm"), "{text}");
        let (_, text) = refusal(&file("object", &elf(2, 1, 62), 0o755));
        assert!(text.contains("type 1"), "{text}");
    }

    #[test]
    fn a_script_becomes_its_interpreter() {
        let scratch = Scratch::new("script");
        let script = scratch.file("script", b"#! /bin/cat  -A b \nbody", 0o755);
        let program = resolve(script.as_os_str(), &["x".into()], None).unwrap();
        assert_eq!(program.path, Path::new("/bin/cat"));
        let expected: Vec<OsString> =
            vec!["/bin/cat".into(), "-A b".into(), script.into(), "x".into()];
        assert_eq!(program.arguments, expected);
    }

    #[test]
    fn scripts_do_not_loop() {
        let scratch = Scratch::new("loop");
        let line = format!("#!{}\n", scratch.0.join("loop").display());
        let script = scratch.file("loop", line.as_bytes(), 0o755);
        let (code, text) = refusal(&script);
        assert!(code == 126 && text.contains("deep"), "{text}");
    }
}
