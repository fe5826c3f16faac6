-- Run once, by the postgres image, when the volume is new: one server here, yet two databases that know
-- nothing of each other, each owned by the one role that may connect to it. The tables are not made
-- here: each service brings its own schema up to date when it starts.

\getenv orders_password ORDERS_DB_PASSWORD
\getenv inventory_password INVENTORY_DB_PASSWORD

CREATE ROLE orders LOGIN PASSWORD :'orders_password';
CREATE DATABASE orders OWNER orders;
REVOKE ALL ON DATABASE orders FROM PUBLIC;

CREATE ROLE inventory LOGIN PASSWORD :'inventory_password';
CREATE DATABASE inventory OWNER inventory;
REVOKE ALL ON DATABASE inventory FROM PUBLIC;
