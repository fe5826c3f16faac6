-- What retention looks for (shared/src/retention.rs): the oldest rows of a table, a batch at a time.
-- Both services have this.
--
-- Built under a lock that keeps writers waiting, not CONCURRENTLY: that would wait for every session
-- that has a snapshot, and the replicas that wait for this migration have one.

-- Inbox rows that may be forgotten. outbox has its own index from the beginning, and stream_versions
-- is kept for ever.
CREATE INDEX processed_messages_by_age ON processed_messages (processed_at);

-- Here ends what both services have. The orders' own: keys that may be forgotten. A key that comes
-- again after that makes a new order.
CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_at);
