//! Files of pages on other hosts.

use std::fs::File;

use super::*;
use crate::{FileName, Place, ServedFiles, write_tables};

/// Saves a set of three nodes. Node 2 writes its pages to the directory `elsewhere`.
fn save_apart(
    directory: &Path,
    elsewhere: &Path,
    base: Option<&Path>,
    nodes: &[Node; 3],
) -> Result<(), CheckpointError> {
    let base = base.map(|base| Set::open(base).unwrap());
    let set = NewSet::create_for_hosts(directory, 5, base.as_ref())?;
    let mut written = write(&set, &nodes[..2]);
    let path = elsewhere.join("pages.2");
    let mut writer = PagesWriter::new(File::create(&path).unwrap(), set.identity(), 2).unwrap();
    for (page, byte) in &nodes[2].pages {
        writer.page(*page, &[*byte; PAGE_BYTES]).unwrap();
    }
    for range in &nodes[2].unchanged {
        writer.unchanged(range.clone());
    }
    let ends = writer.finish().unwrap();
    let file = File::open(&path).unwrap();
    write_tables(&file, ends.bytes, &mut &set.pages()[2]).unwrap();
    written.push(PageFile {
        place: Some(Place {
            host: "beta".into(),
            directory: elsewhere.to_owned(),
        }),
        ..ends.into()
    });
    set.commit(machine(), b"state", written, "0.1.0", 1)?;
    Ok(())
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
    let mut names: Vec<_> = entries.map(|entry| name(entry.unwrap())).collect();
    names.sort();
    names
}

fn served(directory: &Path) -> ServedFiles {
    let source = Set::open(directory).unwrap().pages_source().unwrap();
    let open = |name: FileName| (File::open(&name.path).unwrap(), name);
    let files = source.elsewhere().map(|(_, name)| open(name.clone()));
    ServedFiles::open(files).unwrap()
}

fn first_byte(served: &ServedFiles, page: u64) -> (u64, u8) {
    let mut bytes = Vec::new();
    let first = served.read(page, &mut bytes).unwrap();
    (first, bytes[(page - first) as usize * PAGE_BYTES])
}

#[test]
fn a_file_on_another_host_is_checked_and_named() {
    let scratch = Scratch::new("apart");
    let (directory, elsewhere) = (scratch.join("one"), scratch.join("beta"));
    fs::create_dir(&elsewhere).unwrap();
    let nodes = [ones(&[9, 1, 2]), ones(&[2047, 3]), ones(&[500, 40, 41])];
    save_apart(&directory, &elsewhere, None, &nodes).unwrap();
    let wanted = ["machine", "manifest", "pages.0", "pages.1", "tables.2"];
    assert_eq!(names(&directory), wanted);
    let set = Set::open(&directory).unwrap();
    set.check_tables().unwrap();
    let message = format!(
        "pages.2 is on beta, in {}: copy it from there to {}",
        elsewhere.display(),
        directory.join("pages.2").display()
    );
    assert_eq!(check(&directory), Err(message));
    let source = set.pages_source().unwrap();
    let places: Vec<_> = source.elsewhere().map(|(place, _)| &place.host).collect();
    assert_eq!(places, ["beta"]);
    let mut here = Vec::new();
    let read = source.read_all_here(&(0..u64::MAX), |first, _| {
        here.push(first);
        Ok::<_, CheckpointError>(())
    });
    read.unwrap();
    assert_eq!(here, [9, 1, 2047, 3]);
    let served = served(&directory);
    assert_eq!(first_byte(&served, 41), (40, 1));
    let has = |page| served.read(page, &mut Vec::new()).is_ok();
    assert!(has(500) && !has(9) && !has(42));

    // Copied into the directory, it is a file of the set like any other.
    fs::copy(elsewhere.join("pages.2"), directory.join("pages.2")).unwrap();
    assert_eq!(check(&directory), Ok(()));
    let all = [1, 2, 3, 9, 40, 41, 500, 2047].map(|page| (page, 1));
    assert_eq!(memory(&directory), all);
}

#[test]
fn a_directory_that_hosts_share_has_all_files() {
    let scratch = Scratch::new("shared");
    let directory = scratch.join("one");
    let nodes = [ones(&[9]), ones(&[3]), ones(&[500])];
    save_apart(&directory, &directory, None, &nodes).unwrap();
    let wanted = ["machine", "manifest", "pages.0", "pages.1", "pages.2"];
    assert_eq!(names(&directory), wanted);
    assert_eq!(check(&directory), Ok(()));
    assert_eq!(memory(&directory), [(3, 1), (9, 1), (500, 1)]);
}

#[test]
fn the_latest_file_of_a_host_has_a_page() {
    let scratch = Scratch::new("apart-chain");
    let (one, two) = (scratch.join("one"), scratch.join("two"));
    let (beta_one, beta_two) = (scratch.join("beta-one"), scratch.join("beta-two"));
    for directory in [&beta_one, &beta_two] {
        fs::create_dir(directory).unwrap();
    }
    let nodes = [ones(&[1]), ones(&[3]), ones(&[40, 41, 42])];
    save_apart(&one, &beta_one, None, &nodes).unwrap();
    let nodes = [
        twos(&[], &[1..2]),
        twos(&[3, 42], &[]),
        twos(&[41], &[40..41]),
    ];
    save_apart(&two, &beta_two, Some(&one), &nodes).unwrap();
    let served = served(&two);
    assert_eq!(first_byte(&served, 40).1, 1);
    assert_eq!(first_byte(&served, 41).1, 2);
    fs::copy(beta_one.join("pages.2"), one.join("pages.2")).unwrap();
    fs::copy(beta_two.join("pages.2"), two.join("pages.2")).unwrap();
    let wanted = [(1, 1), (3, 2), (40, 1), (41, 2), (42, 2)];
    assert_eq!(memory(&two), wanted);
}

#[test]
fn damaged_tables_are_named() {
    let scratch = Scratch::new("apart-damage");
    let (directory, elsewhere) = (scratch.join("one"), scratch.join("beta"));
    fs::create_dir(&elsewhere).unwrap();
    let nodes = [ones(&[1]), ones(&[3]), ones(&[40, 41])];
    save_apart(&directory, &elsewhere, None, &nodes).unwrap();
    let path = directory.join("tables.2");
    let good = fs::read(&path).unwrap();
    let problem = || {
        let set = Set::open(&directory).unwrap();
        set.check_tables().map_err(|error| error.to_string())
    };
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        fs::write(&path, &bad).unwrap();
        let error = problem().unwrap_err();
        assert!(error.contains("tables.2 "), "byte {at}: {error}");
        if at % 7 == 0 {
            fs::write(&path, &good[..at]).unwrap();
            assert!(problem().is_err(), "{at} bytes");
        }
    }
    fs::remove_file(&path).unwrap();
    let error = problem().unwrap_err();
    assert_eq!(error, format!("{} is missing", path.display()));
}
