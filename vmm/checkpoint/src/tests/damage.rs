//! What is missing, damaged or of another set is found and named.

use super::*;

/// Each part of each file, changed, cut and removed. `set` is the one that is opened.
fn damage(set: &Path, damaged: &Path, names: &[&str]) {
    for name in names {
        let path = damaged.join(name);
        let named = |error: &str, what: &str| {
            assert!(
                error.contains(path.to_str().unwrap()),
                "{what} of {name}: {error}"
            );
        };
        let good = fs::read(&path).unwrap();
        let every = (good.len() / 64).max(1);
        for at in (0..good.len()).step_by(every).chain([good.len() - 1]) {
            let mut bad = good.clone();
            bad[at] ^= 4;
            fs::write(&path, bad).unwrap();
            named(&whole(set).unwrap_err(), &format!("byte {at}"));
        }
        fs::write(&path, &good[..good.len() - 1]).unwrap();
        named(&whole(set).unwrap_err(), "a cut");
        fs::remove_file(&path).unwrap();
        let error = whole(set).unwrap_err();
        let expected = if *name == "manifest" {
            "is incomplete"
        } else {
            "is missing"
        };
        assert!(error.contains(expected), "without {name}: {error}");
        assert!(
            error.contains(damaged.to_str().unwrap()),
            "without {name}: {error}"
        );
        fs::write(&path, good).unwrap();
        whole(set).unwrap();
    }
}

/// The error with what it comes from.
fn whole(directory: &Path) -> Result<(), String> {
    let checked = Set::open(directory).and_then(|set| set.verify());
    checked.map_err(|error| match std::error::Error::source(&error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    })
}

#[test]
fn damage_in_any_file_is_named() {
    let scratch = Scratch::new("damage");
    let directory = scratch.join("one");
    save(&directory, None, &[ones(&[9, 1, 2]), ones(&[3])]);
    damage(
        &directory,
        &directory,
        &["pages.0", "pages.1", "machine", "manifest"],
    );
}

#[test]
fn damage_in_any_set_of_a_chain_is_named() {
    let scratch = Scratch::new("damaged-chain");
    let [one, two] = ["one", "two"].map(|name| scratch.join(name));
    save(&one, None, &[ones(&[9, 1, 2]), ones(&[3])]);
    save(
        &two,
        Some(&one),
        &[twos(&[7, 1], &[2..5, 0..1]), twos(&[], &[9..10])],
    );
    damage(&two, &two, &["pages.0", "pages.1", "machine", "manifest"]);
    damage(&two, &one, &["pages.0", "pages.1", "manifest"]);
    // The state of a base is not needed.
    fs::remove_file(one.join("machine")).unwrap();
    check(&two).unwrap();
    assert!(check(&one).is_err());
}

#[test]
fn the_tables_are_checked_without_the_pages() {
    let scratch = Scratch::new("tables");
    let [one, two] = ["one", "two"].map(|name| scratch.join(name));
    save(&one, None, &[ones(&[1, 2])]);
    save(&two, Some(&one), &[twos(&[1], &[2..3])]);
    let path = one.join("pages.0");
    let good = fs::read(&path).unwrap();
    let set = Set::open(&two).unwrap();
    let change = |at: usize| {
        let mut bad = good.clone();
        bad[at] ^= 4;
        fs::write(&path, bad).unwrap();
    };
    change(2 * PAGE_BYTES);
    set.check_tables().unwrap();
    let source = set.pages_source().unwrap();
    let index = source.find(2).unwrap();
    let error = source.read(index, &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains(path.to_str().unwrap()), "{error}");
    assert!(set.verify().is_err());
    change(3 * PAGE_BYTES);
    assert!(set.check_tables().is_err() && set.pages_source().is_err());
}

#[test]
fn files_of_two_sets_do_not_mix() {
    let scratch = Scratch::new("mixed");
    let [one, two] = ["one", "two"].map(|name| scratch.join(name));
    save(&one, None, &[ones(&[1]), ones(&[2])]);
    save(&two, None, &[ones(&[1]), ones(&[2])]);
    fs::copy(two.join("pages.1"), one.join("pages.1")).unwrap();
    let error = check(&one).unwrap_err();
    assert!(error.contains("another checkpoint"), "{error}");
}

#[test]
fn a_page_that_a_set_names_twice_is_found() {
    let scratch = Scratch::new("twice");
    let one = scratch.join("one");
    save(&one, None, &[ones(&[2])]);
    for (number, (nodes, what)) in [
        ([ones(&[1, 2]), ones(&[2])], "a page is in two files"),
        ([twos(&[], &[0..9]), ones(&[8])], "in a file and unchanged"),
        ([ones(&[8]), twos(&[], &[8..9])], "in a file and unchanged"),
        ([twos(&[], &[0..9]), twos(&[], &[8..9])], "unchanged in two"),
        ([twos(&[3], &[2..4]), ones(&[8])], "pages.0 is damaged"),
    ]
    .into_iter()
    .enumerate()
    {
        let directory = scratch.join(&format!("bad{number}"));
        save(&directory, Some(&one), &nodes);
        let error = check(&directory).unwrap_err();
        assert!(error.contains(what), "{number}: {error}");
        let set = Set::open(&directory).unwrap();
        assert!(set.check_tables().is_err() && set.extents().is_err());
    }
}

#[test]
fn the_manifest_and_the_files_name_as_many_pages() {
    let scratch = Scratch::new("numbers");
    let [one, two] = ["one", "two"].map(|name| scratch.join(name));
    save(&one, None, &[ones(&[1, 2])]);
    save(&two, Some(&one), &[twos(&[1], &[2..3])]);
    let good = Set::open(&two).unwrap().manifest().clone();
    for change in [
        |file: &mut PageFile| file.pages += 1,
        |file: &mut PageFile| file.unchanged += 1,
        |file: &mut PageFile| file.bytes += 1,
    ] {
        let mut bad = good.clone();
        change(&mut bad.pages[0]);
        fs::write(two.join("manifest"), bad.encode().unwrap()).unwrap();
        let error = check(&two).unwrap_err();
        assert!(error.contains("pages.0 is damaged"), "{error}");
    }
}
