-- Builds a database on disk, queries it, changes it. `ROWS` is replaced by
-- the number of rows; 100000 rows make about 10 MB, 1000000 about 100 MB.
-- The page cache is as big as the database, so that its memory matters.
PRAGMA journal_mode = DELETE;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -200000;
CREATE TABLE item (id INTEGER PRIMARY KEY, key INTEGER, name TEXT, body TEXT);
BEGIN;
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ROWS)
INSERT INTO item SELECT i, (i * 2654435761) % 400009, 'name ' || ((i * 40503) % 65536),
	substr('the quick brown fox jumps over the lazy dog and runs into the woods', 1 + i % 20, 40 + i % 17)
FROM n;
COMMIT;
CREATE INDEX item_key ON item (key);
CREATE INDEX item_name ON item (name);
SELECT count(*), sum(key), min(name), max(name) FROM item;
SELECT key, count(*) FROM item GROUP BY key HAVING count(*) > 1 ORDER BY 2 DESC, 1 LIMIT 10;
SELECT a.id, b.id FROM item a JOIN item b ON a.key = b.key AND a.id < b.id ORDER BY a.id, b.id LIMIT 20;
SELECT substr(name, 6, 2) AS p, count(*), sum(length(body)) FROM item GROUP BY p ORDER BY p LIMIT 20;
UPDATE item SET body = upper(body) WHERE id % 10 = 3;
DELETE FROM item WHERE key % 17 = 0;
SELECT count(*), sum(length(body)), sum(unicode(body)) FROM item;
SELECT id, name FROM item ORDER BY body DESC, id LIMIT 10;
PRAGMA integrity_check;
