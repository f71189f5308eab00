//! Sets with bases.

use super::*;
use crate::CHAIN_MAX;

#[test]
fn unchanged_pages_are_those_of_the_base() {
    let scratch = Scratch::new("base");
    let [one, two, three] = ["one", "two", "three"].map(|name| scratch.join(name));
    save(&one, None, &[ones(&[1, 2, 3, 4]), ones(&[10])]);
    // Page 3 is zero now, pages 20 to 29 were and are, and page 4 has another owner.
    save(
        &two,
        Some(&one),
        &[twos(&[2], &[1..2, 20..30]), twos(&[11], &[4..5, 10..11])],
    );
    let expected = [(1, 1), (2, 2), (4, 1), (10, 1), (11, 2)];
    assert_eq!(memory(&two), expected);
    save(&three, Some(&two), &[twos(&[1], &[2..2048])]);
    assert_eq!(memory(&three), [(1, 2), (2, 2), (4, 1), (10, 1), (11, 2)]);
    check(&three).unwrap();
    let set = Set::open(&three).unwrap();
    assert_eq!(set.chain_length(), 3);
    let directories: Vec<&Path> = set.directories().collect();
    assert_eq!(directories, [&three, &two, &one].map(PathBuf::as_path));
}

#[test]
fn a_folder_of_sets_can_be_moved() {
    let scratch = Scratch::new("moved");
    let folder = scratch.join("folder");
    fs::create_dir(&folder).unwrap();
    let [one, two] = ["one", "two"].map(|name| folder.join(name));
    save(&one, None, &[ones(&[1, 2])]);
    save(&two, Some(&one), &[twos(&[2], &[1..2])]);
    let set = Set::open(&two).unwrap();
    let base = set.manifest().base.as_ref().unwrap();
    assert_eq!(base.directory, Path::new("../one"));
    let apart = scratch.join("apart");
    save(&apart, Some(&two), &[twos(&[], &[0..2048])]);
    let moved = scratch.join("elsewhere");
    fs::rename(&folder, &moved).unwrap();
    assert_eq!(memory(&moved.join("two")), [(1, 1), (2, 2)]);
    // A link to it is another name, not another place.
    let link = scratch.join("link");
    std::os::unix::fs::symlink(moved.join("two"), &link).unwrap();
    assert_eq!(memory(&link), [(1, 1), (2, 2)]);
    // One that is not beside its base names it by its path.
    let error = check(&apart).unwrap_err();
    let expected = format!(
        "{} needs {}, which is missing",
        apart.display(),
        two.display()
    );
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn a_base_that_is_missing_or_another_is_named() {
    let scratch = Scratch::new("bases");
    let [one, two, three] = ["one", "two", "three"].map(|name| scratch.join(name));
    save(&one, None, &[ones(&[1])]);
    save(&two, Some(&one), &[twos(&[2], &[1..2])]);
    save(&three, Some(&two), &[twos(&[3], &[1..3])]);
    let refused = |why: &str| {
        let error = Set::open(&three).unwrap_err().to_string();
        let expected = format!("{} needs {}, which {why}", two.display(), one.display());
        assert!(error.contains(&expected), "{error}");
    };
    fs::rename(&one, scratch.join("away")).unwrap();
    refused("is missing");
    save(&one, None, &[ones(&[1])]);
    refused("is another checkpoint");
    fs::remove_file(one.join("manifest")).unwrap();
    refused("is incomplete");
    fs::write(one.join("manifest"), "weft-checkpoint 9 x\n").unwrap();
    let error = Set::open(&three).unwrap_err();
    let expected = format!("{} needs {}", two.display(), one.display());
    assert_eq!(error.to_string(), expected);
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("manifest has format 9"), "{source}");
}

#[test]
fn a_base_has_as_much_memory() {
    let scratch = Scratch::new("memory");
    let [one, two] = ["one", "two"].map(|name| scratch.join(name));
    save(&one, None, &[ones(&[1])]);
    let more = Machine {
        memory_bytes: 16 << 20,
        pages_end: 4096,
        ..machine()
    };
    let error = save_machine(&two, Some(&one), more.clone(), &[twos(&[], &[])]);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("another amount of memory"), "{error}");
    assert!(!two.exists());
    // A manifest can say so nevertheless.
    save(&two, Some(&one), &[twos(&[], &[])]);
    let mut manifest = Set::open(&two).unwrap().manifest().clone();
    manifest.machine = more;
    fs::write(two.join("manifest"), manifest.encode().unwrap()).unwrap();
    let error = Set::open(&two).unwrap_err().to_string();
    let expected = format!(
        "{} needs {}, which is of a machine",
        two.display(),
        one.display()
    );
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn unchanged_pages_need_a_base() {
    let scratch = Scratch::new("none");
    let one = scratch.join("one");
    let error = save_machine(&one, None, machine(), &[twos(&[1], &[2..3])]);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("without a base"), "{error}");
    assert!(!one.exists());
}

#[test]
fn a_chain_has_an_end() {
    let scratch = Scratch::new("long");
    let directory = |number: usize| scratch.join(&number.to_string());
    save(&directory(1), None, &[ones(&[1, 2])]);
    for number in 2..=CHAIN_MAX {
        let base = directory(number - 1);
        save(
            &directory(number),
            Some(&base),
            &[twos(&[number as u64], &[0..2])],
        );
    }
    let last = directory(CHAIN_MAX);
    check(&last).unwrap();
    assert_eq!(memory(&last), [(1, 1), (CHAIN_MAX as u64, 2)]);
    let set = Set::open(&last).unwrap();
    assert_eq!(set.chain_length(), CHAIN_MAX);
    let more = directory(CHAIN_MAX + 1);
    let error = NewSet::create(&more, 1, Some(&set))
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("a full save"), "{error}");
    assert!(error.contains(more.to_str().unwrap()) && !more.exists());
    // The first set gets a base too: another, and then the last one.
    save(&directory(0), None, &[ones(&[])]);
    for (base, name) in [
        (directory(0), "0".to_owned()),
        (last.clone(), CHAIN_MAX.to_string()),
    ] {
        let mut manifest = Set::open(&directory(1)).unwrap().manifest().clone();
        manifest.base = Some(crate::Base {
            directory: Path::new("..").join(name),
            identity: Set::open(&base).unwrap().manifest().identity,
        });
        let path = directory(1).join("manifest");
        let good = fs::read(&path).unwrap();
        fs::write(&path, manifest.encode().unwrap()).unwrap();
        let error = Set::open(&last).unwrap_err().to_string();
        assert!(error.contains("a full save"), "{error}");
        assert!(error.contains(last.to_str().unwrap()), "{error}");
        fs::write(&path, good).unwrap();
    }
}

#[test]
fn a_base_needs_a_name_in_utf_8() {
    use std::os::unix::ffi::OsStrExt;
    let scratch = Scratch::new("name");
    let one = scratch.0.join(std::ffi::OsStr::from_bytes(b"one\xff"));
    save(&one, None, &[ones(&[1])]);
    let two = scratch.join("two");
    let error = NewSet::create(&two, 1, Some(&Set::open(&one).unwrap()));
    let error = error.err().unwrap().to_string();
    assert!(error.contains("not UTF-8"), "{error}");
    assert!(!two.exists());
}
