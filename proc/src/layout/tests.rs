//! The layout against a naive model: one map entry per page.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Addresses of the model are these many pages, so that operations collide.
const PAGES: u64 = 48;
const BASE: u64 = 0x10_0000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ModelPage {
    prot: u32,
    kind: Kind,
    flags: u32,
    file: u32,
    file_offset: u64,
}

#[derive(Default)]
struct Model(BTreeMap<u64, ModelPage>);

impl Model {
    fn insert(&mut self, region: &Region) {
        for page in (region.start..region.end).step_by(PAGE as usize) {
            let file_offset = if region.file == 0 {
                0
            } else {
                region.file_offset + (page - region.start)
            };
            self.0.insert(
                page,
                ModelPage {
                    prot: region.prot,
                    kind: region.kind,
                    flags: region.flags,
                    file: region.file,
                    file_offset,
                },
            );
        }
    }
    fn remove(&mut self, start: u64, end: u64) {
        self.0.retain(|page, _| *page < start || *page >= end);
    }
    fn protect(&mut self, start: u64, end: u64, prot: u32) -> Result<(), LayoutError> {
        for address in (start..end).step_by(PAGE as usize) {
            match self.0.get_mut(&address) {
                Some(page) => page.prot = prot,
                None => return Err(LayoutError::NotMapped { address }),
            }
        }
        Ok(())
    }
    fn relocate(&mut self, old: u64, old_length: u64, new: u64, new_length: u64) {
        let source: Vec<ModelPage> = (old..old + old_length)
            .step_by(PAGE as usize)
            .map(|address| self.0[&address])
            .collect();
        self.remove(new, new + new_length);
        self.remove(old, old + old_length);
        for (index, page) in (0..new_length / PAGE).zip(
            source
                .iter()
                .copied()
                .map(Some)
                .chain(std::iter::repeat(None)),
        ) {
            let page = page.unwrap_or_else(|| {
                let last = *source.last().unwrap();
                let beyond = (index + 1) * PAGE - old_length;
                ModelPage {
                    file_offset: if last.file == 0 {
                        0
                    } else {
                        last.file_offset + beyond
                    },
                    ..last
                }
            });
            self.0.insert(new + index * PAGE, page);
        }
    }
    fn writable_anonymous_bytes(&self) -> u64 {
        self.0
            .values()
            .filter(|p| p.kind == Kind::Anonymous && p.prot & PROT_WRITE != 0)
            .count() as u64
            * PAGE
    }
}

#[derive(Clone, Debug)]
enum Step {
    Insert(Region),
    Remove(u64, u64),
    Protect(u64, u64, u32),
    Relocate(u64, u64, u64, u64),
    Place(u64, Option<u64>),
}

fn pages(from: u64, length: u64) -> (u64, u64) {
    let start = BASE + from * PAGE;
    (start, start + length * PAGE)
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..PAGES, 1..12u64);
    let kind = prop_oneof![
        Just((Kind::Anonymous, 0u32)),
        Just((Kind::Anonymous, 0)),
        Just((Kind::FileReadOnly, 1)),
        Just((Kind::HomeOnly, 2)),
    ];
    prop_oneof![
        (range.clone(), 0..4u32, kind, 0..2u32).prop_map(
            |((from, length), prot, (kind, file), flags)| {
                let (start, end) = pages(from, length);
                // Files are mapped at an offset that follows the address, so that
                // neighbours can merge.
                let file_offset = if file == 0 { 0 } else { start };
                Step::Insert(Region {
                    start,
                    end,
                    prot,
                    kind,
                    flags,
                    file,
                    file_offset,
                })
            }
        ),
        range.clone().prop_map(|(f, l)| {
            let (s, e) = pages(f, l);
            Step::Remove(s, e)
        }),
        (range.clone(), 0..4u32).prop_map(|((f, l), p)| {
            let (s, e) = pages(f, l);
            Step::Protect(s, e, p)
        }),
        (range.clone(), range).prop_map(|((f, l), (g, m))| {
            let (old, old_end) = pages(f, l);
            let (new, new_end) = pages(g, m);
            Step::Relocate(old, old_end - old, new, new_end - new)
        }),
        (1..20u64, proptest::option::of(0..PAGES))
            .prop_map(|(l, hint)| Step::Place(l * PAGE, hint.map(|h| BASE + h * PAGE))),
    ]
}

fn compare(layout: &Layout, model: &Model) {
    layout.check().unwrap();
    let mut seen = BTreeMap::new();
    for region in layout.regions() {
        for page in (region.start..region.end).step_by(PAGE as usize) {
            let one = region.clipped(&(page..page + PAGE));
            seen.insert(
                page,
                ModelPage {
                    prot: one.prot,
                    kind: one.kind,
                    flags: one.flags,
                    file: one.file,
                    file_offset: one.file_offset,
                },
            );
        }
    }
    assert_eq!(seen, model.0);
    assert_eq!(
        layout.writable_anonymous_bytes(),
        model.writable_anonymous_bytes()
    );
    assert_eq!(layout.mapped_bytes(), model.0.len() as u64 * PAGE);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn behaves_like_a_map_of_pages(steps in proptest::collection::vec(step(), 1..60)) {
        let mut storage = vec![Region::default(); 256];
        let mut layout = Layout::new(&mut storage);
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Insert(region) => {
                    layout.insert(region).unwrap();
                    model.insert(&region);
                }
                Step::Remove(start, end) => {
                    layout.remove(start, end).unwrap();
                    model.remove(start, end);
                }
                Step::Protect(start, end, prot) => {
                    prop_assert_eq!(layout.protect(start, end, prot), model.protect(start, end, prot));
                }
                Step::Relocate(old, old_length, new, new_length) => {
                    let apart = old + old_length <= new || new + new_length <= old;
                    let whole = layout.first_hole(old, old + old_length).is_none();
                    let result = layout.relocate(old, old_length, new, new_length);
                    prop_assert_eq!(result.is_ok(), apart && whole);
                    if result.is_ok() {
                        model.relocate(old, old_length, new, new_length);
                    }
                }
                Step::Place(length, hint) => {
                    let (low, high) = pages(0, PAGES);
                    match layout.find_free(length, PAGE, hint, low, high) {
                        Ok(start) => {
                            prop_assert!(start >= low && start + length <= high);
                            prop_assert!(model.0.range(start..start + length).next().is_none());
                        }
                        Err(_) => {
                            let run = longest_free_run(&model);
                            prop_assert!(run < length, "a hole of {} was there for {}", run, length);
                        }
                    }
                }
            }
            compare(&layout, &model);
            for page in 0..PAGES + 12 {
                let address = BASE + page * PAGE + 17;
                prop_assert_eq!(layout.lookup(address).is_some(), model.0.contains_key(&(address - 17)));
            }
        }
    }

    #[test]
    fn a_full_array_refuses_and_changes_nothing(steps in proptest::collection::vec(step(), 1..60), capacity in 1..8usize) {
        let mut storage = vec![Region::default(); capacity];
        let mut layout = Layout::new(&mut storage);
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Insert(region) => match layout.insert(region) {
                    Ok(()) => model.insert(&region),
                    Err(error) => { let full = matches!(error, LayoutError::Full { .. }); prop_assert!(full); }
                },
                Step::Remove(start, end) => if layout.remove(start, end).is_ok() { model.remove(start, end) },
                Step::Protect(start, end, prot) => match layout.protect(start, end, prot) {
                    Err(LayoutError::Full { .. }) => {}
                    _ => { let _ = model.protect(start, end, prot); }
                },
                Step::Relocate(old, old_length, new, new_length) => {
                    if layout.relocate(old, old_length, new, new_length).is_ok() {
                        model.relocate(old, old_length, new, new_length);
                    }
                }
                Step::Place(..) => {}
            }
            compare(&layout, &model);
        }
    }
}

fn longest_free_run(model: &Model) -> u64 {
    let (mut run, mut longest) = (0, 0);
    for page in 0..PAGES {
        run = if model.0.contains_key(&(BASE + page * PAGE)) {
            0
        } else {
            run + PAGE
        };
        longest = longest.max(run);
    }
    longest
}

#[test]
fn large_mappings_keep_room_to_grow() {
    let mut storage = vec![Region::default(); 16];
    let mut layout = Layout::new(&mut storage);
    let (low, high) = (LOWEST, LIMIT);
    let length = 8 << 20;
    let mut below = high;
    for _ in 0..3 {
        let start = layout.find_free(length, PAGE, None, low, high).unwrap();
        assert_eq!(start, below - 2 * length);
        layout
            .insert(Region::anonymous(
                start,
                start + length,
                PROT_READ | PROT_WRITE,
            ))
            .unwrap();
        assert!(layout.is_free(start + length, start + 2 * length));
        below = start;
    }
    // A small mapping does not take the room either.
    let small = layout.find_free(PAGE, PAGE, None, low, high).unwrap();
    assert_eq!(small, below - PAGE);
    layout.check().unwrap();
}

#[test]
fn room_to_grow_gives_way_when_space_is_short() {
    let mut storage = vec![Region::default(); 16];
    let layout = Layout::new(&mut storage);
    let length = 8 << 20;
    assert_eq!(
        layout.find_free(length, PAGE, None, LOWEST, LOWEST + length),
        Ok(LOWEST)
    );
    assert!(matches!(
        layout.find_free(length + PAGE, PAGE, None, LOWEST, LOWEST + length),
        Err(LayoutError::NoHole { .. })
    ));
}

#[test]
fn alignment_and_hints_are_respected() {
    let mut storage = vec![Region::default(); 16];
    let mut layout = Layout::new(&mut storage);
    let huge = 2 << 20;
    let start = layout
        .find_free(PAGE, huge, None, LOWEST, 0x7fff_f000)
        .unwrap();
    assert!(start.is_multiple_of(huge));
    assert_eq!(
        layout.find_free(PAGE, PAGE, Some(0x50_0000), LOWEST, LIMIT),
        Ok(0x50_0000)
    );
    layout
        .insert(Region::anonymous(0x50_0000, 0x50_1000, 0))
        .unwrap();
    assert_ne!(
        layout.find_free(PAGE, PAGE, Some(0x50_0000), LOWEST, LIMIT),
        Ok(0x50_0000)
    );
    assert_eq!(layout.writable_anonymous_bytes(), 0);
}

#[test]
fn ranges_that_are_not_pages_are_refused() {
    let mut storage = vec![Region::default(); 4];
    let mut layout = Layout::new(&mut storage);
    assert!(matches!(
        layout.insert(Region::anonymous(1, PAGE, 0)),
        Err(LayoutError::Invalid { .. })
    ));
    assert!(matches!(
        layout.insert(Region::anonymous(PAGE, PAGE, 0)),
        Err(LayoutError::Invalid { .. })
    ));
    assert!(matches!(
        layout.remove(LIMIT, LIMIT + PAGE),
        Err(LayoutError::Outside { .. })
    ));
    assert!(matches!(
        layout.relocate(PAGE, u64::MAX, 0, PAGE),
        Err(LayoutError::Invalid { .. })
    ));
}
