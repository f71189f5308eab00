//! Copies files of production with loom's primitives in place of the standard library's,
//! and makes *mutants* of them: the same file with one edit that breaks the protocol.
//!
//! An edit must match exactly once, so a model whose file changed does not go on silently
//! with a mutant that breaks nothing.

use std::fs;
use std::path::Path;

/// What is changed in a file, and into what.
type Edit = (&'static str, &'static str);

/// Edits for every file: where the primitives come from.
const PRIMITIVES: [Edit; 4] = [
    ("use std::sync::atomic::", "use crate::strong::"),
    ("use std::sync::", "use crate::sync::"),
    ("use std::thread::", "use crate::sync::thread::"),
    ("use super::message::", "use crate::message::"),
];

struct Source {
    /// Of the copy, and of a mutant before its name.
    name: &'static str,
    path: &'static str,
    /// For the model's size; must match.
    smaller: &'static [Edit],
    mutants: &'static [(&'static str, &'static [Edit])],
}

const SOURCES: [Source; 5] = [
    Source {
        name: "waker",
        path: "../vmm/platform/src/interrupts/waker.rs",
        smaller: &[],
        mutants: &[
            (
                "looks_before_it_announces",
                &[(
                    "        self.waiting.store(true, Ordering::SeqCst);\n        if !has_events() {",
                    "        let came = has_events();\n        self.waiting.store(true, Ordering::SeqCst);\n        if !came {",
                )],
            ),
            (
                "does_not_look_again",
                &[(
                    "        if !has_events() {",
                    "        let _ = has_events;\n        {",
                )],
            ),
            (
                "rings_without_a_mark",
                &[(
                    ".unwrap_or_else(|poison| poison.into_inner()) = true;",
                    ".unwrap_or_else(|poison| poison.into_inner()) |= false;",
                )],
            ),
        ],
    },
    Source {
        name: "posted",
        path: "../vmm/platform/src/interrupts/posted.rs",
        smaller: &[],
        mutants: &[
            (
                "summary_before_the_bit",
                &[(
                    "        self.requested[word].fetch_or(bit, Ordering::SeqCst);\n        self.summary.fetch_or(FIXED, Ordering::SeqCst);",
                    "        self.summary.fetch_or(FIXED, Ordering::SeqCst);\n        self.requested[word].fetch_or(bit, Ordering::SeqCst);",
                )],
            ),
            (
                "summary_taken_last",
                &[
                    (
                        "let summary = self.summary.swap(0, Ordering::SeqCst);",
                        "let summary = self.summary.load(Ordering::SeqCst);",
                    ),
                    (
                        "            }\n        }\n        pending\n",
                        "            }\n        }\n        self.summary.swap(0, Ordering::SeqCst);\n        pending\n",
                    ),
                ],
            ),
            (
                "trigger_mode_after_the_bit",
                &[
                    (
                        "        if level {\n",
                        "        self.requested[word].fetch_or(bit, Ordering::SeqCst);\n        if level {\n",
                    ),
                    (
                        "        }\n        self.requested[word].fetch_or(bit, Ordering::SeqCst);\n        self.summary",
                        "        }\n        self.summary",
                    ),
                ],
            ),
            (
                "bits_read_and_cleared_apart",
                &[(
                    "pending.requested[word] = cell.swap(0, Ordering::SeqCst);",
                    "pending.requested[word] = cell.load(Ordering::SeqCst);\n                    cell.swap(0, Ordering::SeqCst);",
                )],
            ),
        ],
    },
    Source {
        name: "kick",
        path: "../vmm/vcpu-kvm/src/kick.rs",
        smaller: &[],
        mutants: &[
            (
                "asks_last",
                &[(
                    "        if !self.asked.swap(true, Ordering::SeqCst) {\n            self.interrupt();\n        }",
                    "        self.interrupt();\n        self.asked.swap(true, Ordering::SeqCst);",
                )],
            ),
            (
                "signals_before_the_flag",
                &[
                    (
                        "        self.set_immediate_exit();\n        let thread",
                        "        let thread",
                    ),
                    (
                        "            self.control.signal(thread);\n        }",
                        "            self.control.signal(thread);\n        }\n        self.set_immediate_exit();",
                    ),
                ],
            ),
            (
                "clears_what_a_kick_set",
                &[(
                    "        if self.asked.load(Ordering::SeqCst) {",
                    "        if false {",
                )],
            ),
            (
                "sets_no_flag",
                &[(
                    "        self.set_immediate_exit();\n        let thread",
                    "        let thread",
                )],
            ),
        ],
    },
    Source {
        name: "wakeup",
        path: "../vmm/coherent-memory/src/wakeup.rs",
        smaller: &[],
        mutants: &[
            (
                "unparks_where_it_was_woken_before",
                &[("if !self.woken.swap", "if self.woken.swap")],
            ),
            (
                "forgets_before_it_sleeps",
                &[(
                    "        if !self.woken.load(Ordering::SeqCst) {\n            thread::park_timeout(patience);\n        }\n        self.woken.store(false, Ordering::SeqCst);",
                    "        self.woken.store(false, Ordering::SeqCst);\n        thread::park_timeout(patience);",
                )],
            ),
            (
                "forgets_too_late",
                &[(
                    "self.woken.store(false, Ordering::SeqCst);",
                    "self.woken.store(false, Ordering::Relaxed);",
                )],
            ),
        ],
    },
    Source {
        name: "pins",
        path: "../dsm/src/controller/pins.rs",
        smaller: &[
            ("const PINS: usize = 2048;", "const PINS: usize = 2;"),
            ("const TIMED: usize = 64;", "const TIMED: usize = 1;"),
            (
                "[const { (AtomicU64::new(FREE), AtomicU64::new(0)) }; TIMED]",
                "[(AtomicU64::new(FREE), AtomicU64::new(0))]",
            ),
        ],
        mutants: &[(
            "pin_is_removed_without_a_claim",
            &[(
                "pin\n                    .compare_exchange(page, FREE, Ordering::SeqCst, Ordering::Relaxed)\n                    .is_ok();",
                "{ pin.store(FREE, Ordering::SeqCst); true };",
            )],
        )],
    },
];

fn main() {
    let out = std::env::var("OUT_DIR").expect("Cargo sets it");
    for source in &SOURCES {
        println!("cargo:rerun-if-changed={}", source.path);
        let text = fs::read_to_string(source.path)
            .unwrap_or_else(|error| panic!("{}: {error}", source.path));
        let text = edited(&production(&text), source.smaller, source.path);
        let write = |name: &str, text: &str| {
            fs::write(Path::new(&out).join(format!("{name}.rs")), text).expect("a new file");
        };
        write(source.name, &text);
        for (name, edits) in source.mutants {
            let name = format!("{}_{name}", source.name);
            write(&name, &edited(&text, edits, &name));
        }
    }
}

/// The file without its tests and its module's doc comment, with other primitives.
fn production(text: &str) -> String {
    let text = text
        .split("#[cfg(test)]\nmod tests")
        .next()
        .unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with("//!"));
    let mut text = lines.flat_map(|line| [line, "\n"]).collect::<String>();
    for (from, to) in PRIMITIVES {
        text = text.replace(from, to);
    }
    text
}

fn edited(text: &str, edits: &[Edit], what: &str) -> String {
    edits.iter().fold(text.to_owned(), |text, (from, to)| {
        let count = text.matches(from).count();
        assert_eq!(count, 1, "{what}: the file has this {count} times:\n{from}");
        text.replace(from, to)
    })
}
