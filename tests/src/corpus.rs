//! The correctness corpus: real tools, and programs that look for trouble.
//!
//! Footprints are what the first process of a native run had resident at most,
//! rounded up; they only decide how small the budgets are.

use crate::case::Case;

/// Every case.
pub fn cases() -> Vec<Case> {
    let mut cases = tools();
    cases.extend(languages());
    cases.extend(programs());
    cases.extend(ends());
    cases.extend(elastic());
    cases
}

fn tools() -> Vec<Case> {
    vec![
        Case::new(
            "sort-1",
            "sort -S 48M --parallel=1 -T . {inputs}/text-24 -o sorted",
        )
        .output("sorted")
        .memory(46, 1000)
        .jumps(),
        Case::new(
            "sort-2",
            "sort -S 48M --parallel=2 -T . {inputs}/text-24 -o sorted",
        )
        .output("sorted")
        .memory(46, 1000),
        Case::new(
            "sort-numeric",
            "sort -n -k1,1 -S 100M --parallel=1 {inputs}/text-24",
        )
        .memory(44, 1000)
        .jumps(),
        Case::new("sha256sum", "sha256sum {inputs}/text-24 {inputs}/text-2").memory(8, 0),
        Case::new("gzip", "gzip -9 -c").stdin("text-8").memory(6, 0),
        Case::new("gunzip", "gzip -d -k text.gz")
            .prepare("gzip -c {inputs}/text-8 > text.gz")
            .output("text")
            .memory(6, 0),
        Case::new("xz", "xz -2 -c {inputs}/text-2")
            .tool("xz")
            .memory(17, 500)
            .home(80),
        Case::new(
            "xz-threads",
            "xz -T2 -1 --block-size=1MiB -c {inputs}/text-2",
        )
        .tool("xz")
        .memory(20, 500)
        .home(70),
        Case::new("unxz", "xz -d -k text.xz")
            .tool("xz")
            .prepare("xz -4 -c {inputs}/text-2 > text.xz")
            .output("text")
            .memory(7, 0),
        Case::new("sqlite-small", "sqlite3 -init /dev/null items.db")
            .tool("sqlite3")
            .prepare("sed s/ROWS/60000/ {sources}/work.sql > work.sql")
            .output("items.db")
            .memory(17, 500)
            .script("work.sql"),
        Case::new("sqlite-100-mb", "sqlite3 -init /dev/null items.db")
            .tool("sqlite3")
            .prepare("sed s/ROWS/1000000/ {sources}/work.sql > work.sql")
            .output("items.db")
            .memory(190, 5000)
            .script("work.sql")
            .long(),
    ]
}

fn languages() -> Vec<Case> {
    vec![
        Case::new("mawk", "mawk -f {sources}/work.awk {inputs}/text-2")
            .tool("mawk")
            .memory(14, 500)
            .home(75),
        Case::new("gawk", "gawk -f {sources}/work.awk {inputs}/text-2")
            .tool("gawk")
            .memory(42, 500)
            .home(70),
        Case::new("perl", "perl {sources}/work.pl {inputs}/text-2")
            .tool("perl")
            .memory(28, 500)
            .home(85),
        Case::new("python", "{python} {sources}/work.py {inputs}/text-2 30000")
            .tool("python3")
            .memory(46, 500)
            .home(70),
        Case::new("exceptions", "{programs}/exceptions 600")
            .program("exceptions")
            .memory(14, 500),
        Case::new("go-static", "{programs}/gowork 32")
            .program("gowork")
            .memory(52, 1000),
        Case::new("bash", "bash {sources}/pipeline.sh {inputs}/text-2").memory(8, 0),
        Case::new("static", "{programs}/hello-static one two").program("hello-static"),
    ]
}

fn programs() -> Vec<Case> {
    vec![
        Case::new("threads", "{programs}/threads 24 4")
            .program("threads")
            .memory(40, 1000),
        Case::new("children", "{programs}/children 24")
            .program("children")
            .memory(27, 1000),
        Case::new("clones", "{programs}/clones 8")
            .program("clones")
            .memory(10, 500),
        Case::new("held", "{programs}/held 4")
            .program("held")
            .memory(6, 300)
            .home(50),
        Case::new("answers", "{programs}/answers 8")
            .program("answers")
            .memory(10, 500)
            .home(60),
        Case::new("traced", "{programs}/traced 8")
            .program("traced")
            .memory(10, 500)
            .home(60),
        Case::new("mappings", "{programs}/mappings file 24")
            .program("mappings")
            .output("file")
            .memory(30, 1000),
        Case::new("coherence", "{programs}/coherence 16 3")
            .program("coherence")
            .memory(18, 1000)
            .jumps(),
        Case::new("blocks", "{programs}/blocks 16 20000")
            .program("blocks")
            .memory(18, 1000)
            .jumps(),
        Case::new("corners", "{programs}/corners 16 20")
            .program("corners")
            .memory(20, 1000),
        Case::new("coherence-long", "{programs}/coherence 64 12")
            .program("coherence")
            .memory(68, 10000)
            .jumps()
            .long(),
    ]
}

/// Ways to end, each after the program has spread over the nodes.
fn ends() -> Vec<Case> {
    let ways = [
        "exit 0",
        "exit 1",
        "exit 122",
        "exit 125",
        "_exit 255",
        "return 42",
        "abort 0",
        "segv 0",
        "segv-readonly 0",
        "fpe 0",
        "ill 0",
        "bus 0",
        "kill 2",
        "kill 9",
        "kill 13",
        "kill 15",
        "handler 0",
        "siglongjmp 0",
        "restart 0",
        "mask 0",
        "timer 3",
        "orphan 4",
    ];
    ways.iter()
        .map(|way| {
            Case::new(
                &format!("ends-{}", way.replace(' ', "-")),
                &format!("{{programs}}/ends {way} 8"),
            )
            .program("ends")
            .memory(9, 500)
        })
        .collect()
}

fn elastic() -> Vec<Case> {
    [
        ("depth_first_search", 24, 35),
        ("linear_search", 48, 35),
        ("dijkstra", 32, 60),
        ("block_sort", 16, 60),
        ("heap_sort", 4, 60),
        ("count_sort", 4, 70),
        ("search_rounds", 24, 35),
        ("touch", 32, 35),
    ]
    .iter()
    .map(|&(name, size_mib, home_percent)| {
        Case::new(name, &format!("{{programs}}/{name} {size_mib}"))
            .program(name)
            .memory(size_mib + 2, 500)
            .home(home_percent)
    })
    .collect()
}
