-- Who sent parked messages back, or threw them away. Both services have this table, each in its own
-- database, and the two files that create it are the same to the letter (shared/src/parking/audit.rs).
-- A row is committed before the first message moves: without one nothing moves.
CREATE TABLE parking_audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    action text NOT NULL CHECK (action IN ('redrive', 'discard')),
    -- As they call themselves: the token and the shell's login say who may, not who it is.
    who text NOT NULL CHECK (octet_length(who) BETWEEN 1 AND 200),
    -- What was asked for, as the operations API takes it: which messages, how many at most, how many a
    -- second. `{}` is all of them.
    filter jsonb NOT NULL,
    max integer,
    rate double precision,
    -- How many messages the filter meant. NULL until all were looked at.
    matched integer CHECK (matched >= 0),
    -- How many have left the parking. Written as the run goes, not with each message: after a crash it
    -- is a little less than the truth.
    done integer NOT NULL DEFAULT 0 CHECK (done >= 0),
    started_at timestamptz NOT NULL DEFAULT now(),
    -- NULL while it runs, and for ever after a crash.
    finished_at timestamptz,
    -- 'finished', 'interrupted', or 'failed: ' and why.
    outcome text,
    CHECK ((finished_at IS NULL) = (outcome IS NULL))
);
