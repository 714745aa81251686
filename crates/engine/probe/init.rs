//! Answers one line per command line. A thread counts, so that going on can be told from beginning.

use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

static COUNT: AtomicU64 = AtomicU64::new(0);

pub fn run() -> ExitCode {
    std::thread::spawn(|| {
        loop {
            COUNT.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let mut memory: Vec<u8> = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("standard input can be read");
        let (verb, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match verb {
            "count" => say(&COUNT.load(Ordering::Relaxed).to_string()),
            "echo" => say(rest),
            "fill" => {
                let mebibytes: usize = rest.parse().expect("a number of MiB");
                memory =
                    (0..mebibytes << 20).map(|at| at.wrapping_mul(2_654_435_761).to_le_bytes()[2]).collect();
                say("filled");
            }
            "sum" => {
                let sum =
                    memory.iter().fold(0_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add((*byte).into()));
                say(&format!("{sum:016x}"));
            }
            "write" => {
                let (path, text) = rest.split_once(' ').expect("a path and a text");
                say(&format!("{:?}", std::fs::write(path, text)));
            }
            "grow" => {
                let (path, mebibytes) = rest.split_once(' ').expect("a path and a number of MiB");
                let bytes = vec![7_u8; mebibytes.parse::<usize>().expect("a number of MiB") << 20];
                say(&format!("{:?}", std::fs::write(path, bytes)));
            }
            "read" => {
                say(&std::fs::read_to_string(rest).map_or_else(|e| e.to_string(), |t| t.replace('\n', "|")))
            }
            // Writes numbered lines without end, from a thread.
            "flood" => drop(std::thread::spawn(flood)),
            "exit" => return ExitCode::from(rest.parse::<u8>().expect("an exit code")),
            other => say(&format!("? {other}")),
        }
    }
    ExitCode::SUCCESS
}

fn flood() {
    let mut number = 0_u64;
    loop {
        say(&format!("flood {number}"));
        number += 1;
    }
}

fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{text}\n").as_bytes()).expect("standard output can be written");
    out.flush().expect("standard output can be written");
}
