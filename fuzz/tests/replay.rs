//! Every input of the corpus again, crashes of the past among them.

use std::process::Command;

#[test]
fn no_input_of_the_corpus_fails() {
    let replay = env!("CARGO_BIN_EXE_weft-fuzz");
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus");
    let ended = Command::new(replay).args(["replay", corpus]).status();
    assert!(ended.unwrap().success());
}
