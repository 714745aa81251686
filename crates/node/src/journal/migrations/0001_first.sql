CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    info TEXT NOT NULL,     -- what is told of it, JSON
    machine TEXT NOT NULL   -- the lifecycle's state, JSON
) STRICT;

-- At most one per sandbox: what is being done to it, written before the first step.
CREATE TABLE operations (
    sandbox TEXT PRIMARY KEY,
    op TEXT NOT NULL,       -- JSON
    started_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE templates (
    id TEXT PRIMARY KEY,
    info TEXT NOT NULL,     -- JSON
    owner TEXT,
    created_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE aliases (
    name TEXT PRIMARY KEY,
    template TEXT NOT NULL REFERENCES templates (id) ON DELETE CASCADE,
    created_ms INTEGER NOT NULL
) STRICT;

-- Plan digest → the root file system that it gave.
CREATE TABLE build_cache (
    digest TEXT PRIMARY KEY,
    rootfs TEXT NOT NULL,
    created_ms INTEGER NOT NULL
) STRICT;

-- Lineage as it is now: a removed snapshot's children hang on its parent. The bytes are the store's.
CREATE TABLE snapshots (
    id TEXT PRIMARY KEY,
    parent TEXT,
    sandbox TEXT NOT NULL,
    -- 1: nobody asked for it by itself (a pause, a policy): the next one makes it superfluous.
    automatic INTEGER NOT NULL,
    owner TEXT,
    created_ms INTEGER NOT NULL
) STRICT;
CREATE INDEX snapshots_by_sandbox ON snapshots (sandbox, created_ms);
CREATE INDEX snapshots_by_parent ON snapshots (parent);

CREATE TABLE snapshot_names (
    name TEXT PRIMARY KEY,
    snapshot TEXT NOT NULL REFERENCES snapshots (id) ON DELETE CASCADE,
    created_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE keys (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    hint TEXT NOT NULL,
    hash BLOB NOT NULL UNIQUE,
    created_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE idempotency (
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    result TEXT NOT NULL,   -- JSON
    created_ms INTEGER NOT NULL,
    PRIMARY KEY (owner, key)
) STRICT;
CREATE INDEX idempotency_by_age ON idempotency (created_ms);

CREATE TABLE receipts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    sandbox TEXT NOT NULL,
    receipt TEXT NOT NULL   -- JSON
) STRICT;
CREATE INDEX receipts_by_sandbox ON receipts (sandbox, seq);

CREATE TABLE events (
    seq INTEGER PRIMARY KEY,
    at_ms INTEGER NOT NULL,
    sandbox TEXT,
    kind TEXT NOT NULL,
    message TEXT NOT NULL
) STRICT;
CREATE INDEX events_by_sandbox ON events (sandbox, seq);

CREATE TABLE metrics (
    sandbox TEXT NOT NULL,
    at_ms INTEGER NOT NULL,
    metric TEXT NOT NULL,   -- JSON
    PRIMARY KEY (sandbox, at_ms)
) STRICT, WITHOUT ROWID;
