//! Running the agent: as a sandbox's process 1, or on TCP without a sandbox.

use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::context::{Ctx, Settings};
use crate::control::{self, System};
use crate::http::{Services, envd, serve_stream};
use crate::process::Processes;
use crate::{awake, carrier, sudo, vm_init};

/// When memory runs out, what clients started goes before the agent.
const OOM_SCORE_ADJ: &str = "100";

/// After it was asked to, a process has this long to end.
const END_GRACE: Duration = Duration::from_secs(2);

/// Options of `agent serve`.
#[derive(Debug)]
pub struct Serve {
    pub listen: SocketAddr,
    pub control: SocketAddr,
    /// What a wake takes for `/`; `None`: a wake changes no file.
    pub root: Option<PathBuf>,
}

impl Default for Serve {
    fn default() -> Self {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Self { listen: any, control: any, root: None }
    }
}

fn start(system: System) -> io::Result<(Ctx, Services, CancellationToken)> {
    log();
    let processes = Processes::default();
    processes.reaper().start()?;
    let ctx = Ctx::new(Settings::default(), processes);
    let shutdown = CancellationToken::new();
    let services =
        Services { envd: envd(&ctx), control: control::router(ctx.clone(), system, shutdown.clone()) };
    Ok((ctx, services, shutdown))
}

fn log() {
    let level = std::env::var("DORMOUSE_LOG").ok().and_then(|level| level.parse().ok());
    tracing_subscriber::fmt()
        .with_max_level(level.unwrap_or(tracing::Level::INFO))
        .with_writer(io::stderr)
        .with_ansi(false)
        .init();
}

/// What process 1 runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Host {
    /// The sandbox ends with this process.
    Sandbox,
    /// A whole machine, whose kernel would panic if this process ended.
    Machine,
}

/// `agent init`.
pub async fn init(host: Host) -> io::Result<()> {
    // Inherited by all it starts: process 1 itself is never chosen. Best effort, as is the choice.
    let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ);
    let (ctx, services, shutdown) = start(System::Sandbox)?;
    // Process 1 has no default actions; where the kernel does not see to that, these do.
    let ignored =
        [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup(), SignalKind::quit()]
            .map(signal);
    for failed in ignored.into_iter().filter_map(Result::err) {
        tracing::warn!(error = %failed, "a signal cannot be ignored");
    }
    if let Err(error) = awake::listen(ctx.clone(), Path::new(awake::RUN_DIR)) {
        tracing::warn!(%error, "awake locks cannot be held");
    }
    if let Err(error) = sudo::server::start(ctx.processes().reaper()) {
        tracing::warn!(%error, "sudo cannot be served");
    }
    let carried = tokio::spawn(carry(ctx.clone(), services));
    shutdown.cancelled().await;
    end_processes(&ctx).await;
    carried.abort();
    if host == Host::Machine {
        vm_init::end("it was asked to");
    }
    Ok(())
}

/// If process 1 ended, the sandbox would: it stays, whatever becomes of the carrier.
async fn carry(ctx: Ctx, services: Services) {
    if let Err(error) = carrier::run(ctx, services).await {
        tracing::error!(%error, "the carrier broke");
    }
    std::future::pending::<()>().await;
}

/// `agent serve`: prints the addresses of envd and of the control service, a line each.
pub async fn serve(options: Serve) -> io::Result<()> {
    let run_dir = options.root.as_ref().map(|root| root.join("run/dormouse"));
    let system = options.root.map_or(System::Untouched, System::Folder);
    let (ctx, services, shutdown) = start(system)?;
    if let Some(run_dir) = run_dir {
        awake::listen(ctx.clone(), &run_dir)?;
    }
    let (envd, control) =
        (TcpListener::bind(options.listen).await?, TcpListener::bind(options.control).await?);
    let mut stdout = io::stdout();
    writeln!(stdout, "envd {}\ncontrol {}", envd.local_addr()?, control.local_addr()?)?;
    stdout.flush()?;
    tokio::select! {
        () = accept(envd, services.envd) => {}
        () = accept(control, services.control) => {}
        () = shutdown.cancelled() => {}
    }
    end_processes(&ctx).await;
    Ok(())
}

async fn accept(listener: TcpListener, router: Router) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let _ = stream.set_nodelay(true);
                tokio::spawn(serve_stream(stream, router.clone()));
            }
            Err(error) => {
                tracing::warn!(%error, "a connection cannot be accepted");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}

/// Asks all that was started to end, waits a little, and writes the file systems out.
async fn end_processes(ctx: &Ctx) {
    ctx.processes().close();
    let _ = tokio::time::timeout(END_GRACE, ctx.processes().all_ended()).await;
    let _ = tokio::task::spawn_blocking(rustix::fs::sync).await;
}
