//! Words for a POSIX shell.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// One word that a shell takes as it is.
pub fn quote(word: impl AsRef<OsStr>) -> OsString {
    let mut quoted = vec![b'\''];
    for byte in word.as_ref().as_bytes() {
        match byte {
            b'\'' => quoted.extend(br"'\''"),
            byte => quoted.push(*byte),
        }
    }
    quoted.push(b'\'');
    OsString::from_vec(quoted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_takes_a_quoted_word_as_it_is() {
        for word in [&b"a b"[..], b"it's $HOME", b"", b"\xff\n\\"] {
            let mut line = OsString::from("printf %s ");
            line.push(quote(OsStr::from_bytes(word)));
            let said = std::process::Command::new("sh")
                .arg("-c")
                .arg(line)
                .output();
            assert_eq!(said.unwrap().stdout, word);
        }
    }
}
