//! What can be asked on the command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{ArgAction, Args, Parser, Subcommand};
use dormouse_engine::microvm::MonitorUsers;
use dormouse_node::model::IdlePolicy;
use dormouse_types::EngineKind;

use super::error::HELP;
use crate::serve::{LISTEN_DEFAULT, ServeConfig};
use crate::setup::SetupArgs;

#[derive(Parser)]
#[command(
    name = "dormouse",
    version,
    about = "Computers for AI agents that can sleep",
    long_about = "Computers for AI agents that can sleep: sandboxes that pause, resume, fork and roll back with \
                  their files, memory, processes and open sockets. `dormouse setup` prepares this machine, \
                  `dormouse serve` runs the daemon, everything else talks to it. E2B's clients work unmodified: \
                  `dormouse env` prints what points them here.",
    after_long_help = HELP,
    arg_required_else_help = true
)]
pub struct Cli {
    /// The daemon's data folder
    #[arg(
        long,
        global = true,
        env = "DORMOUSE_DATA_DIR",
        default_value = "/var/lib/dormouse",
        value_name = "DIR"
    )]
    pub data_dir: PathBuf,
    /// Print JSON on stdout, for programs
    #[arg(long, global = true)]
    pub json: bool,
    /// The daemon's address [default: that of the daemon on the data folder, else http://127.0.0.1:3000]
    #[arg(long, global = true, env = "DORMOUSE_URL", value_name = "URL")]
    pub url: Option<String>,
    /// API key [default: E2B_API_KEY, else the data folder's own where it can be read]
    #[arg(long, global = true, env = "DORMOUSE_API_KEY", value_name = "KEY", hide_env_values = true)]
    pub key: Option<String>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Run the daemon
    #[command(after_help = "Example:\n    dormouse serve --listen 127.0.0.1:3000")]
    Serve(ServeArgs),
    /// Say what this host can do, which engine it would choose and why, and what mends what is missing
    #[command(after_help = "Ends with 7 only if no engine can run here.")]
    Doctor,
    /// Install what is needed and build the default template; names everything first
    Setup(SetupArgs),
    /// API keys
    #[command(subcommand)]
    Key(KeyCommand),
    /// Print the variables that point E2B's clients (and this one) at the daemon
    #[command(after_help = "Example:\n    eval \"$(dormouse env)\" && python my_agent.py")]
    Env {
        /// Lines that a shell evaluates, or plain NAME=value lines
        #[arg(long, default_value = "export")]
        shell: EnvForm,
    },
    /// Templates: what sandboxes are made of
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Make a sandbox
    #[command(
        after_help = "Examples:\n    dormouse create\n    dormouse create --template base --timeout 3600 \
                            --env TOKEN=x --metadata job=42 --idle 15"
    )]
    Create(CreateArgs),
    /// List sandboxes
    Ls(LsArgs),
    /// Everything about one sandbox: state, tier, why it is awake, receipts
    Info { sandbox: String },
    /// Run a command in a sandbox; stdin, stdout, stderr and the exit code are the command's
    #[command(after_help = "Examples:\n    dormouse exec SANDBOX -- python3 -c 'print(1)'\n    \
                            tar c . | dormouse exec SANDBOX -- tar x -C /srv\n    \
                            dormouse exec -d SANDBOX -- python3 -m http.server 8000")]
    Exec(ExecArgs),
    /// An interactive terminal in a sandbox
    Shell(ShellArgs),
    /// Copy files and folders in (LOCAL SANDBOX:/path) or out (SANDBOX:/path LOCAL)
    #[command(after_help = "Examples:\n    dormouse cp data.csv SANDBOX:/home/user/\n    \
                            dormouse cp SANDBOX:/home/user/out ./out")]
    Cp(CpArgs),
    /// What a sandbox logged
    Logs(LogsArgs),
    /// End sandboxes; their snapshots stay
    Kill {
        #[arg(required = true)]
        sandboxes: Vec<String>,
    },
    /// Put a sandbox to sleep on disk: files, memory, processes, open sockets
    Pause(PauseArgs),
    /// Wake a paused sandbox
    Resume {
        sandbox: String,
        /// Seconds from now until the deadline
        #[arg(long)]
        timeout: Option<i64>,
    },
    /// Take a snapshot and keep running
    Checkpoint(CheckpointArgs),
    /// Make live copies that go on from this instant, each with an identity of its own
    Fork(ForkArgs),
    /// Put a sandbox back to one of its snapshots
    Rollback { sandbox: String, snapshot: String },
    /// Set when a sandbox times out, in seconds from now
    Timeout { sandbox: String, seconds: i64 },
    /// Set when a sandbox that does nothing is put to sleep
    Idle(IdleArgs),
    /// Snapshots
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// The lineage as a tree: which snapshot and sandbox came from which
    Log {
        /// Only this one's line
        sandbox: Option<String>,
    },
    /// Print HOST:PORT of a port inside a sandbox, by name
    Port { sandbox: String, port: u16 },
    /// Print how a port inside a sandbox is reached over HTTP
    Url { sandbox: String, port: u16 },
    /// What happens, as it happens
    Events(EventsArgs),
    /// What each sandbox uses
    Top {
        /// Print it once instead of every two seconds
        #[arg(long)]
        once: bool,
    },
    /// Remove what nothing needs, and say what that was
    Gc,
    #[command(hide = true)]
    Keeper(KeeperArgs),
    #[command(hide = true)]
    Monitor(MonitorArgs),
    /// Print the OpenAPI document
    #[command(hide = true)]
    Openapi,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum EnvForm {
    Export,
    Plain,
}

#[derive(Args)]
pub struct ServeArgs {
    /// Address and port
    #[arg(long, env = "DORMOUSE_LISTEN", default_value = LISTEN_DEFAULT, value_name = "ADDR")]
    pub listen: SocketAddr,
    /// Sandbox ports are reached as PORT-SANDBOX.DOMAIN; it may carry a port [default: localhost]
    #[arg(long, env = "DORMOUSE_DOMAIN")]
    pub domain: Option<String>,
    /// A PEM bundle that sandboxes shall trust too, such as a TLS-inspecting gateway's
    #[arg(long, value_name = "FILE")]
    pub trust_host_ca: Option<PathBuf>,
    /// Freeze sandboxes after so many seconds of doing nothing, unless they ask for something else [default: never]
    #[arg(long, value_name = "SECONDS")]
    pub idle_freeze: Option<u32>,
    /// Put them to disk after so many seconds of doing nothing [default: never]
    #[arg(long, value_name = "SECONDS")]
    pub idle_disk: Option<u32>,
    /// Runtimes kept ready per template
    #[arg(long)]
    pub pool: Option<usize>,
    /// The runsc executable [default: found in PATH]
    #[arg(long, value_name = "FILE")]
    pub runsc: Option<PathBuf>,
    /// What isolates sandboxes of templates that name nothing else; this one must be usable here. auto: microvm
    /// where there is hardware virtualisation, else gvisor
    #[arg(long, env = "DORMOUSE_ENGINE", default_value = "auto", value_name = "auto|gvisor|microvm")]
    pub engine: EngineChoice,
    /// Bring a microVM's memory when it touches it (userfaultfd), and not by mapping the snapshot's files
    #[arg(long, env = "DORMOUSE_LAZY_RESTORE", value_parser = FalseyValueParser::new())]
    pub lazy_restore: bool,
    /// Give microVMs that are booted from now on a network card; not the default before real guests have used one for a
    /// while
    #[arg(long, env = "DORMOUSE_MICROVM_NETWORK", value_parser = FalseyValueParser::new())]
    pub microvm_network: bool,
    /// User and group ids that nobody else on this host has (1879048192:268435454 usually): the first one is the group of
    /// all microVMs' monitors, the others are their users [default: monitors run as the daemon does]
    #[arg(long, env = "DORMOUSE_MONITOR_IDS", value_name = "FIRST:COUNT", value_parser = monitor_users)]
    pub monitor_ids: Option<MonitorUsers>,
}

/// Which engine comes first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EngineChoice {
    #[default]
    Auto,
    Named(EngineKind),
}

impl std::str::FromStr for EngineChoice {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        if given == "auto" {
            return Ok(Self::Auto);
        }
        given.parse().map(Self::Named).map_err(|_| "it is not one of auto, gvisor and microvm".to_owned())
    }
}

#[derive(Args)]
pub struct KeeperArgs {
    #[arg(long)]
    pub dir: PathBuf,
    #[arg(long)]
    pub sandbox: dormouse_types::SandboxId,
}

#[derive(Args)]
pub struct MonitorArgs {
    /// All that it may read or write lies here
    #[arg(long)]
    pub within: PathBuf,
    /// Whom it becomes, in a root folder and namespaces of its own
    #[arg(long, requires = "gid")]
    pub uid: Option<u32>,
    #[arg(long, requires = "uid")]
    pub gid: Option<u32>,
    /// Its folder
    pub dir: PathBuf,
}

#[derive(Subcommand)]
pub enum KeyCommand {
    /// Make an API key; it is told once
    Create {
        /// What it is called
        #[arg(default_value = "default", conflicts_with = "named")]
        name: String,
        #[arg(long = "name", id = "named", hide = true)]
        named: Option<String>,
    },
    /// List API keys
    Ls,
    /// Remove an API key
    Rm { id: String },
}

#[derive(Subcommand)]
pub enum TemplateCommand {
    /// Build a template from a folder with a template.toml or a Dockerfile
    #[command(after_help = "Example:\n    dormouse template build --name my-env ./env")]
    Build(TemplateBuildArgs),
    /// List templates
    Ls,
    /// Remove a template; what was made of it goes on
    Rm { template: String },
}

#[derive(Args)]
pub struct TemplateBuildArgs {
    /// The folder with the template file and what it copies
    #[arg(default_value = ".")]
    pub context: PathBuf,
    /// The template file, if it is not template.toml or Dockerfile
    #[arg(long, short)]
    pub file: Option<String>,
    /// NAME or NAME:TAG; may be given several times
    #[arg(long, short)]
    pub name: Vec<String>,
    /// Build every step anew
    #[arg(long)]
    pub no_cache: bool,
    #[arg(long)]
    pub engine: Option<EngineKind>,
    #[arg(long)]
    pub cpus: Option<u32>,
    #[arg(long, value_name = "MIB")]
    pub memory: Option<u32>,
    #[arg(long, value_name = "MIB")]
    pub disk: Option<u32>,
    /// Started once when the template is made; goes on in each sandbox
    #[arg(long)]
    pub start: Option<String>,
    /// Succeeds once the start command is ready
    #[arg(long)]
    pub ready: Option<String>,
}

#[derive(Args)]
pub struct CreateArgs {
    /// Template id or name, snapshot id or name
    #[arg(long, short, default_value = "base")]
    pub template: String,
    /// Seconds until the deadline
    #[arg(long, default_value_t = 300)]
    pub timeout: i64,
    /// Pause at the deadline instead of ending it
    #[arg(long)]
    pub pause_on_timeout: bool,
    /// A request to a port wakes it from disk
    #[arg(long)]
    pub auto_resume: bool,
    /// Environment of everything started in it; may be given several times
    #[arg(long, short, value_name = "NAME=VALUE", value_parser = pair)]
    pub env: Vec<(String, String)>,
    /// Labels to find it by; may be given several times
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = pair)]
    pub metadata: Vec<(String, String)>,
    /// gvisor or microvm [default: the template's]
    #[arg(long)]
    pub engine: Option<EngineKind>,
    /// Freeze it after so many seconds of doing nothing
    #[arg(long, value_name = "SECONDS")]
    pub idle: Option<u32>,
    /// Put it to disk after so many seconds of doing nothing
    #[arg(long, value_name = "SECONDS")]
    pub idle_disk: Option<u32>,
    #[arg(long)]
    pub cpus: Option<u32>,
    #[arg(long, value_name = "MIB")]
    pub memory: Option<u32>,
    #[arg(long, value_name = "MIB")]
    pub disk: Option<u32>,
    /// No internet from inside
    #[arg(long)]
    pub no_internet: bool,
}

#[derive(Args)]
pub struct LsArgs {
    /// running, paused; several by comma
    #[arg(long, value_delimiter = ',')]
    pub state: Vec<String>,
    /// Only those with this label
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = pair)]
    pub metadata: Vec<(String, String)>,
    #[arg(long, short)]
    pub template: Option<String>,
    /// Print ids only
    #[arg(long, short)]
    pub quiet: bool,
}

#[derive(Args)]
pub struct ExecArgs {
    pub sandbox: String,
    #[arg(required = true, last = true)]
    pub command: Vec<String>,
    /// Leave it running in the background and print its process id
    #[arg(long, short)]
    pub detach: bool,
    #[command(flatten)]
    pub how: ProcessArgs,
    /// Seconds after which the command is ended
    #[arg(long)]
    pub timeout: Option<u64>,
    /// Do not pass stdin on
    #[arg(long)]
    pub no_stdin: bool,
}

#[derive(Args)]
pub struct ProcessArgs {
    /// The user inside
    #[arg(long, short)]
    pub user: Option<String>,
    /// The folder it starts in
    #[arg(long, short = 'w')]
    pub cwd: Option<String>,
    #[arg(long, short, value_name = "NAME=VALUE", value_parser = pair)]
    pub env: Vec<(String, String)>,
}

#[derive(Args)]
pub struct ShellArgs {
    pub sandbox: String,
    /// What is run in the terminal
    #[arg(last = true)]
    pub command: Vec<String>,
    #[command(flatten)]
    pub how: ProcessArgs,
}

#[derive(Args)]
pub struct CpArgs {
    pub from: String,
    pub to: String,
    /// The user inside
    #[arg(long, short)]
    pub user: Option<String>,
}

#[derive(Args)]
pub struct LogsArgs {
    pub sandbox: String,
    /// At most so many lines
    #[arg(long, short = 'n', default_value_t = 1000)]
    pub lines: u32,
}

#[derive(Args)]
pub struct PauseArgs {
    pub sandbox: String,
    /// Keep the files only; the resume boots
    #[arg(long)]
    pub disk_only: bool,
}

#[derive(Args)]
pub struct CheckpointArgs {
    pub sandbox: String,
    /// A name to find it by
    #[arg(long, short)]
    pub name: Option<String>,
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = pair)]
    pub label: Vec<(String, String)>,
    /// Seconds until it expires; 0: never [default: 30 days]
    #[arg(long)]
    pub ttl: Option<u64>,
}

#[derive(Args)]
pub struct ForkArgs {
    pub sandbox: String,
    #[arg(long, short = 'n', default_value_t = 1)]
    pub count: i64,
    /// Seconds until the copies' deadline
    #[arg(long, default_value_t = 300)]
    pub timeout: i64,
}

#[derive(Args)]
pub struct IdleArgs {
    pub sandbox: String,
    /// Freeze it after so many seconds of doing nothing
    #[arg(long, value_name = "SECONDS")]
    pub freeze: Option<u32>,
    /// Put it to disk after so many seconds of doing nothing
    #[arg(long, value_name = "SECONDS")]
    pub disk: Option<u32>,
}

#[derive(Subcommand)]
pub enum SnapshotCommand {
    /// List snapshots
    Ls {
        /// Only this sandbox's
        #[arg(long)]
        sandbox: Option<String>,
        /// With those that pauses and templates keep for themselves
        #[arg(long)]
        all: bool,
    },
    /// Remove snapshots; says what that frees and who keeps the rest
    Rm {
        #[arg(required = true)]
        snapshots: Vec<String>,
    },
}

#[derive(Args)]
pub struct EventsArgs {
    /// Only this sandbox's
    #[arg(long)]
    pub sandbox: Option<String>,
    /// Those after this number
    #[arg(long, default_value_t = 0)]
    pub since: u64,
    /// End after what is known instead of waiting for more
    #[arg(long, action = ArgAction::SetTrue)]
    pub no_follow: bool,
}

impl ServeArgs {
    #[must_use]
    pub fn config(self, data_dir: &std::path::Path) -> ServeConfig {
        ServeConfig {
            domain: self.domain,
            trust_host_ca: self.trust_host_ca,
            idle: IdlePolicy { freeze_after_s: self.idle_freeze, disk_after_s: self.idle_disk },
            pool: self.pool,
            runsc: self.runsc,
            lazy_restore: self.lazy_restore,
            microvm_network: self.microvm_network,
            engine: self.engine,
            monitor_users: self.monitor_ids,
            ..ServeConfig::new(data_dir, self.listen)
        }
    }
}

fn monitor_users(given: &str) -> Result<MonitorUsers, String> {
    let (first, count) = given.split_once(':').ok_or("it has no `:`")?;
    let number = |text: &str| text.parse::<u32>().map_err(|error| format!("{text:?}: {error}"));
    let (first, count) = (number(first)?, number(count)?);
    let last = first.checked_add(count).filter(|last| *last < u32::MAX);
    if first == 0 || count < 2 || last.is_none() {
        return Err("it is to begin above 0, to hold 2 at least, and to end below 4294967295".to_owned());
    }
    Ok(MonitorUsers { first, count })
}

fn pair(given: &str) -> Result<(String, String), String> {
    let (name, value) = given.split_once('=').ok_or("it has no `=`")?;
    if name.is_empty() {
        return Err("nothing stands before the `=`".to_owned());
    }
    Ok((name.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_takes_the_common_flags() {
        for line in [
            "dormouse ls --json --data-dir /x",
            "dormouse key create --json --data-dir /x",
            "dormouse serve --data-dir /x --listen 127.0.0.1:0",
            "dormouse snapshot rm a b --json",
        ] {
            let parsed = Cli::try_parse_from(line.split(' '));
            assert!(parsed.is_ok(), "{line}: {:?}", parsed.err().map(|error| error.to_string()));
        }
    }

    #[test]
    fn what_follows_the_dashes_is_the_commands() {
        let cli = Cli::try_parse_from(["dormouse", "exec", "s1", "--", "ls", "--json"]).expect("it parses");
        assert!(!cli.json);
        assert!(matches!(cli.command, Command::Exec(args) if args.command == ["ls", "--json"]));
    }
}
