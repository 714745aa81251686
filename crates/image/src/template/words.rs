//! Words, quotes and variables, as Dockerfiles write them.
//!
//! Dockerfile reference, "Environment replacement": `$NAME`, `${NAME}`, `${NAME:-word}`, `${NAME:+word}`;
//! `\` takes the meaning from the next character, `'…'` from all.

use super::Variables;

/// A value may grow by substitution; a chain of them may not grow without end.
const VALUE_BYTES_MAX: usize = 128 << 10;

/// Splits at blanks outside of quotes; quotes and backslashes stay in the words.
pub fn split(text: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(next) = chars.next() {
        match (next, quote) {
            ('\\', None | Some('"')) => {
                word.push('\\');
                word.extend(chars.next());
                continue;
            }
            ('\'' | '"', None) => quote = Some(next),
            (_, Some(open)) if open == next => quote = None,
            (blank, None) if blank.is_whitespace() => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                continue;
            }
            _ => {}
        }
        word.push(next);
    }
    if quote.is_some() {
        return Err("a quote is not closed".to_owned());
    }
    if !word.is_empty() {
        words.push(word);
    }
    Ok(words)
}

/// Removes quotes and backslashes and puts in the variables. What is not set is empty.
pub fn expand(word: &str, variables: &Variables) -> Result<String, String> {
    let chars: Vec<char> = word.chars().collect();
    let mut found = String::new();
    let mut at = 0;
    let mut quote = None;
    while let Some(&next) = chars.get(at) {
        at += 1;
        match (next, quote) {
            ('\'', None) => quote = Some('\''),
            ('\'', Some('\'')) | ('"', Some('"')) => quote = None,
            (_, Some('\'')) => found.push(next),
            ('"', None) => quote = Some('"'),
            ('\\', _) => {
                match chars.get(at) {
                    // Inside double quotes only these lose a meaning.
                    Some(&after) if quote.is_none() || "\"\\$`".contains(after) => {
                        found.push(after);
                        at += 1;
                    }
                    _ => found.push('\\'),
                }
            }
            ('$', _) => at = variable(&chars, at, variables, &mut found)?,
            _ => found.push(next),
        }
        if found.len() > VALUE_BYTES_MAX {
            return Err(format!("a value has more than {VALUE_BYTES_MAX} bytes"));
        }
    }
    Ok(found)
}

/// Reads a variable behind its `$` and returns where the text goes on.
fn variable(chars: &[char], at: usize, variables: &Variables, found: &mut String) -> Result<usize, String> {
    let is_name = |c: &&char| c.is_ascii_alphanumeric() || **c == '_';
    let name_at = |from: usize| chars[from..].iter().take_while(is_name).collect::<String>();
    if chars.get(at) != Some(&'{') {
        let name = name_at(at);
        if name.is_empty() {
            found.push('$');
        }
        found.push_str(variables.get(&name).map_or("", String::as_str));
        return Ok(at + name.len());
    }
    let name = name_at(at + 1);
    let close = chars[at..].iter().position(|c| *c == '}').ok_or("a ${…} is not closed")? + at;
    let modifier: String = chars[at + 1 + name.len()..close].iter().collect();
    let set = variables.get(&name).filter(|value| !value.is_empty());
    if name.is_empty() {
        return Err("a ${…} names no variable".to_owned());
    } else if modifier.is_empty() {
        found.push_str(set.map_or("", String::as_str));
    } else if let Some(default) = modifier.strip_prefix(":-") {
        found.push_str(set.map_or(default, String::as_str));
    } else if let Some(instead) = modifier.strip_prefix(":+") {
        found.push_str(set.map_or("", |_| instead));
    } else {
        return Err(format!("${{{name}{modifier}}} is not understood: use ${{{name}}}, :- or :+"));
    }
    Ok(close + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables() -> Variables {
        [("A".to_owned(), "1".to_owned()), ("EMPTY".to_owned(), String::new())].into()
    }

    #[test]
    fn expansion() {
        for (given, expected) in [
            ("$A", "1"),
            ("x${A}y", "x1y"),
            ("$B-", "-"),
            ("${B:-two}", "two"),
            ("${EMPTY:-two}", "two"),
            ("${A:+yes}", "yes"),
            ("${B:+yes}", ""),
            (r"\$A", "$A"),
            ("'$A'", "$A"),
            ("\"$A b\"", "1 b"),
            (r#""a\"b\n""#, r#"a"b\n"#),
            (r"a\ b", "a b"),
            ("100$", "100$"),
            ("$$A", "$1"),
        ] {
            assert_eq!(expand(given, &variables()).as_deref(), Ok(expected), "{given}");
        }
        for bad in ["${A", "${}", "${A:?x}", "${A%x}"] {
            assert!(expand(bad, &variables()).is_err(), "{bad}");
        }
    }

    #[test]
    fn splitting_keeps_quotes() {
        let words = split(r#"a "b c" d='e f' g\ h  "#).unwrap();
        assert_eq!(words, ["a", "\"b c\"", "d='e f'", r"g\ h"]);
        assert!(split("a 'b").is_err());
    }
}
