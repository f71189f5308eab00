//! The end of what the program has written, from the files that `program` keeps.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use super::folder::Folder;
use crate::request::{OUTPUT_MAX, Output, Stream};

/// At most `bytes` of each stream.
pub fn ends(folder: &Folder, bytes: u64) -> Output {
    // Until the program has started, no file is there.
    let stream = |name| end(&folder.file(name), bytes).unwrap_or_default();
    Output {
        stdout: stream("stdout"),
        stderr: stream("stderr"),
    }
}

fn end(path: &Path, bytes: u64) -> io::Result<Stream> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let wanted = bytes.min(OUTPUT_MAX).min(length);
    file.seek(SeekFrom::Start(length - wanted))?;
    let mut end = Vec::new();
    // It may have grown meanwhile.
    file.take(wanted).read_to_end(&mut end)?;
    let cut = |byte: &u8| wanted < length && (0x80..0xC0).contains(byte);
    let whole = end.iter().take(3).take_while(|byte| cut(byte)).count();
    Ok(Stream {
        length,
        end: String::from_utf8_lossy(&end[whole..]).into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_bounded_and_begins_with_a_whole_character() {
        let file = std::env::temp_dir().join(format!("weft-end-{}", std::process::id()));
        std::fs::write(&file, "one\ntwo µ\n").unwrap();
        let read = |bytes| end(&file, bytes).unwrap();
        assert_eq!(read(100).end, "one\ntwo µ\n");
        assert_eq!((read(2).length, &read(2).end[..]), (11, "\n"));
        assert_eq!(read(3).end, "µ\n");
        assert_eq!(read(0).end, "");
        std::fs::write(&file, vec![1; 3 * OUTPUT_MAX as usize]).unwrap();
        let answer = crate::request::Answer::Output(Output {
            stdout: read(u64::MAX),
            stderr: read(u64::MAX),
        });
        let line = serde_json::to_vec(&answer).unwrap();
        assert!((line.len() as u64) < crate::request::LINE_MAX);
        std::fs::remove_file(&file).unwrap();
        assert!(end(&file, 1).is_err());
    }
}
