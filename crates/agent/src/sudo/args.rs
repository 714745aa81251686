//! The command line of `sudo`, as far as programs and people use it without a terminal's dialogue.

use std::collections::BTreeMap;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args {
    pub user: Option<String>,
    pub login: bool,
    pub shell: bool,
    pub keep_env: bool,
    /// `NAME=value` before the command.
    pub set: BTreeMap<String, String>,
    pub folder: Option<String>,
    pub command: Vec<String>,
    /// `-v`, `-l`, `-k`: nothing to run.
    pub only_check: bool,
}

/// Reads what follows the program's name.
pub fn parse(given: &[String]) -> Result<Args, String> {
    let mut args = Args::default();
    let mut rest = given.iter();
    while let Some(word) = rest.next() {
        if let Some(long) = word.strip_prefix("--") {
            if long.is_empty() {
                args.command.extend(rest.cloned());
                break;
            }
            let (name, value) = long.split_once('=').map_or((long, None), |(n, v)| (n, Some(v.to_owned())));
            option(&mut args, name, value, &mut rest)?;
        } else if let Some(letters) = word.strip_prefix('-').filter(|letters| !letters.is_empty()) {
            short(&mut args, letters, &mut rest)?;
        } else if let Some((name, value)) = assignment(word) {
            args.set.insert(name, value);
        } else {
            args.command.push(word.clone());
            args.command.extend(rest.cloned());
            break;
        }
    }
    Ok(args)
}

fn assignment(word: &str) -> Option<(String, String)> {
    let (name, value) = word.split_once('=')?;
    let plain = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    plain.then(|| (name.to_owned(), value.to_owned()))
}

fn short<'a>(
    args: &mut Args,
    letters: &str,
    rest: &mut impl Iterator<Item = &'a String>,
) -> Result<(), String> {
    for (at, letter) in letters.char_indices() {
        let name = match letter {
            'u' => "user",
            'g' => "group",
            'p' => "prompt",
            'D' => "chdir",
            'i' => "login",
            's' => "shell",
            'E' => "preserve-env",
            'H' => "set-home",
            'n' => "non-interactive",
            'S' => "stdin",
            'k' => "reset-timestamp",
            'K' => "remove-timestamp",
            'b' => "background",
            'v' => "validate",
            'l' => "list",
            other => return Err(format!("the option -{other} is not known")),
        };
        let takes_value = matches!(name, "user" | "group" | "prompt" | "chdir");
        let attached = letters.get(at + 1..).filter(|text| takes_value && !text.is_empty());
        option(args, name, attached.map(str::to_owned), rest)?;
        if takes_value {
            break;
        }
    }
    Ok(())
}

fn option<'a>(
    args: &mut Args,
    name: &str,
    value: Option<String>,
    rest: &mut impl Iterator<Item = &'a String>,
) -> Result<(), String> {
    let mut needed =
        || value.clone().or_else(|| rest.next().cloned()).ok_or_else(|| format!("--{name} needs a value"));
    match name {
        "user" => args.user = Some(needed()?),
        "chdir" => args.folder = Some(needed()?),
        // The target's own group is used; asked for or not, no password is read.
        "group" | "prompt" => drop(needed()?),
        "login" => args.login = true,
        "shell" => args.shell = true,
        "preserve-env" => args.keep_env = true,
        "validate" | "list" | "remove-timestamp" => args.only_check = true,
        "set-home" | "non-interactive" | "stdin" | "reset-timestamp" => {}
        other => return Err(format!("the option {other} is not offered in this sandbox")),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Args, String> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn common_lines_are_read() {
        let args = read("-n apt-get install -y hello").unwrap();
        assert_eq!(args.command, ["apt-get", "install", "-y", "hello"]);
        let args = read("-u postgres -H A=1 B=2 psql -c x").unwrap();
        assert_eq!(args.user.as_deref(), Some("postgres"));
        assert_eq!(args.set.len(), 2);
        assert_eq!(args.command, ["psql", "-c", "x"]);
        assert_eq!(read("-uroot id").unwrap().user.as_deref(), Some("root"));
        assert_eq!(read("-Eu root id").unwrap().command, ["id"]);
        assert!(read("-i").unwrap().login);
        assert_eq!(read("--user=www -- -x").unwrap().command, ["-x"]);
        assert!(read("-v").unwrap().only_check);
    }

    #[test]
    fn what_is_not_known_is_refused() {
        for line in ["-u", "-Z", "--nothing", "--user"] {
            assert!(read(line).is_err(), "{line} was accepted");
        }
    }
}
