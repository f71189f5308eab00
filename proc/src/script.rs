//! Scripts: the `#!` line, read as Linux reads it (`fs/binfmt_script.c`).

/// Bytes of a file that the line must be in (`BINPRM_BUF_SIZE`).
pub const HEAD: usize = 256;
/// Most interpreters that may run one another before execve gives up (ELOOP).
pub const DEPTH_MAX: usize = 5;

/// Which program runs a script.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Script<'a> {
    /// Path of the interpreter.
    pub interpreter: &'a [u8],
    /// Everything after it, as one argument, without blanks at its ends.
    pub argument: Option<&'a [u8]>,
}

/// Why a script has no interpreter.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ScriptError {
    /// Nothing but blanks after `#!`.
    #[error("the script's first line has no interpreter")]
    NoInterpreter,
    /// The path may go on after what Linux reads.
    #[error("the script's interpreter is too long: its path must end within the first 256 bytes")]
    TooLong,
}

/// Reads the first line of a file whose first bytes are `head` ([`HEAD`] of
/// them, or all when the file is shorter). `None` when it is no script.
pub fn parse(head: &[u8]) -> Option<Result<Script<'_>, ScriptError>> {
    let head = &head[..head.len().min(HEAD)];
    let rest = head.strip_prefix(b"#!")?;
    Some(line(rest, head.len() == HEAD))
}

/// The line after `#!`; `cut` when the file may go on behind it.
fn line(rest: &[u8], cut: bool) -> Result<Script<'_>, ScriptError> {
    let end = rest.iter().position(|&byte| byte == b'\n');
    let (line, ended) = match end {
        Some(end) => (&rest[..end], true),
        // A file that ends without a newline ends the line; what is past 256
        // bytes is lost, which is harmless unless it belongs to the path.
        None => (rest, !cut),
    };
    let line = trim(line);
    let is_end = |byte: &u8| is_blank(*byte) || *byte == 0;
    let path_end = line.iter().position(is_end);
    if path_end.is_none() && !ended {
        return Err(ScriptError::TooLong);
    }
    let (interpreter, after) = line.split_at(path_end.unwrap_or(line.len()));
    if interpreter.is_empty() {
        return Err(ScriptError::NoInterpreter);
    }
    // A NUL ends the line for good.
    let argument = match after.first() {
        Some(0) | None => &[],
        _ => {
            let argument = after.split(|&byte| byte == 0).next().unwrap_or(&[]);
            trim(argument)
        }
    };
    Ok(Script {
        interpreter,
        argument: (!argument.is_empty()).then_some(argument),
    })
}

fn is_blank(byte: u8) -> bool {
    byte == b' ' || byte == b'\t'
}

/// Without blanks at either end.
fn trim(mut line: &[u8]) -> &[u8] {
    while let [first, rest @ ..] = line {
        if !is_blank(*first) {
            break;
        }
        line = rest;
    }
    while let [rest @ .., last] = line {
        if !is_blank(*last) {
            break;
        }
        line = rest;
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn script(head: &[u8]) -> (&[u8], Option<&[u8]>) {
        let script = parse(head).unwrap().unwrap();
        (script.interpreter, script.argument)
    }

    #[test]
    fn lines_are_read_as_linux_reads_them() {
        assert_eq!(script(b"#!/bin/sh\necho"), (&b"/bin/sh"[..], None));
        assert_eq!(script(b"#! /bin/sh\n"), (&b"/bin/sh"[..], None));
        assert_eq!(script(b"#!/bin/sh"), (&b"/bin/sh"[..], None));
        assert_eq!(
            script(b"#!\t/usr/bin/env  python3 -u \t\n"),
            (&b"/usr/bin/env"[..], Some(&b"python3 -u"[..]))
        );
        assert_eq!(parse(b"\x7fELF"), None);
        assert_eq!(parse(b"#"), None);
        assert_eq!(parse(b"#!"), Some(Err(ScriptError::NoInterpreter)));
        assert_eq!(parse(b"#! \t\n"), Some(Err(ScriptError::NoInterpreter)));
    }

    #[test]
    fn a_path_that_is_cut_off_is_refused_but_an_argument_is_not() {
        let mut long = b"#!/".to_vec();
        long.resize(300, b'x');
        assert_eq!(parse(&long), Some(Err(ScriptError::TooLong)));
        long[20] = b' ';
        let (interpreter, argument) = script(&long);
        assert_eq!(interpreter.len(), 18);
        assert_eq!(argument.map(<[u8]>::len), Some(HEAD - 21));
    }

    proptest! {
        #[test]
        fn any_bytes_have_an_answer(bytes in proptest::collection::vec(prop_oneof![Just(b' '), Just(b'\n'), Just(0), any::<u8>()], 0..300)) {
            let mut head = b"#!".to_vec();
            head.extend(bytes);
            if let Some(Ok(script)) = parse(&head) {
                prop_assert!(!script.interpreter.is_empty());
                prop_assert!(!script.interpreter.contains(&b'\n'));
            }
        }
    }
}
