/*
 * A web server of one thread, for measuring networks: every request is answered
 * with as many bytes as its path says, and the connection closed.
 *
 *   serve PORT           GET /65536 gives 65536 bytes
 *
 * As nginx with one worker does, it waits for all connections at once (epoll) and
 * answers from memory. A GET of /end ends it with 0. What is no request, or asks
 * for more than 1 MiB, is answered with 400.
 *
 * Says `serve: ready` once it listens. FragVisor (EuroSys 2023), figure 6, has
 * nginx in its place.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
	CONNECTIONS_MAX = 1024,
	REQUEST_MAX = 1024,
	BODY_MAX = 1 << 20,
	EVENTS_MAX = 64,
};

/* By descriptor. */
struct connection {
	size_t got;
	/* Of the answer: bytes of head and body, and how many were sent. */
	size_t head_length, length, sent;
	char request[REQUEST_MAX + 1];
	char head[128];
};

static struct connection connections[CONNECTIONS_MAX];
static char body[BODY_MAX];

static void die(const char *what)
{
	fprintf(stderr, "serve: %s: %s\n", what, strerror(errno));
	exit(1);
}

/* Ends a connection: true, so that callers can say so in one word. */
static int end(int socket)
{
	close(socket);
	return 1;
}

/* Sends what is left; true when the connection has ended. */
static int answer(int socket, struct connection *c)
{
	while (c->sent < c->length) {
		size_t in_head = c->sent < c->head_length ? c->head_length - c->sent : 0;
		size_t in_body = c->sent + in_head - c->head_length;
		struct iovec parts[2] = {
			{ c->head + c->sent - (in_head ? 0 : c->sent), in_head },
			{ body + in_body, c->length - c->sent - in_head },
		};
		ssize_t sent = writev(socket, parts, 2);

		if (sent < 0 && errno == EAGAIN)
			return 0;
		if (sent < 0)
			return end(socket);
		c->sent += (size_t)sent;
	}
	return end(socket);
}

/* Begins the answer to a whole request. */
static void begin(struct connection *c)
{
	unsigned long bytes = 0;
	int known = sscanf(c->request, "GET /%lu ", &bytes) == 1 && bytes <= BODY_MAX;

	if (!strncmp(c->request, "GET /end ", 9))
		exit(0);
	if (!known)
		bytes = 0;
	c->head_length = (size_t)snprintf(c->head, sizeof(c->head),
					  "HTTP/1.0 %s\r\nContent-Length: %lu\r\n"
					  "Connection: close\r\n\r\n",
					  known ? "200 OK" : "400 Bad Request", bytes);
	c->length = c->head_length + bytes;
}

/* Reads and answers; true when the connection has ended. */
static int serve(int socket, struct connection *c)
{
	while (!c->length) {
		ssize_t got = read(socket, c->request + c->got, REQUEST_MAX - c->got);

		if (got < 0 && errno == EAGAIN)
			return 0;
		if (got <= 0)
			return end(socket);
		c->got += (size_t)got;
		c->request[c->got] = 0;
		if (strstr(c->request, "\r\n\r\n") || c->got == REQUEST_MAX)
			begin(c);
	}
	return answer(socket, c);
}

static void accept_all(int listener, int epoll)
{
	for (;;) {
		int socket = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
		struct epoll_event event = {
			.events = EPOLLIN | EPOLLOUT | EPOLLET,
			.data.fd = socket,
		};

		if (socket < 0)
			return;
		if (socket >= CONNECTIONS_MAX) {
			close(socket);
			continue;
		}
		connections[socket].got = connections[socket].length = 0;
		connections[socket].sent = 0;
		/* What is there already comes as an event. */
		if (epoll_ctl(epoll, EPOLL_CTL_ADD, socket, &event))
			die("epoll_ctl");
	}
}

int main(int count, char **words)
{
	int one = 1, port = count == 2 ? atoi(words[1]) : 0;
	struct sockaddr_in place = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
	struct epoll_event events[EVENTS_MAX], event = { .events = EPOLLIN };
	int listener, epoll;

	if (port < 1 || port > 65535) {
		fprintf(stderr, "serve PORT\n");
		return 2;
	}
	memset(body, 'w', sizeof(body));
	/* A client that closes before all is sent ends its connection, not the server. */
	signal(SIGPIPE, SIG_IGN);
	listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	if (listener < 0)
		die("socket");
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(listener, (struct sockaddr *)&place, sizeof(place)) || listen(listener, 512))
		die("cannot listen");
	epoll = epoll_create1(0);
	event.data.fd = listener;
	if (epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event))
		die("epoll");
	puts("serve: ready");
	fflush(stdout);
	for (;;) {
		int ready = epoll_wait(epoll, events, EVENTS_MAX, -1);

		if (ready < 0 && errno != EINTR)
			die("epoll_wait");
		for (int i = 0; i < ready; i++) {
			int socket = events[i].data.fd;

			if (socket == listener)
				accept_all(listener, epoll);
			else
				serve(socket, &connections[socket]);
		}
	}
}
